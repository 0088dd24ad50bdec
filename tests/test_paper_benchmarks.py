"""Tests for the comparisons in benchmarks/paper, without a GPU and without installing peers.

On our side, every test run checks flags and placement, and `make verify` also runs `--dry_run`. On
the peers' side, scripts are parsed and logs are read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.paper import data
from benchmarks.paper.grading import compute_score, is_right, reward_func, trl_reward
from benchmarks.paper.measure import (
    Mark,
    deepspeed_chat_marks,
    our_marks,
    run,
    summarize,
    trl_marks,
    verl_marks,
)
from benchmarks.paper.ppo.models import padded_rows
from benchmarks.paper.run import (
    SHAPES,
    SIZES,
    Case,
    case_of,
    has_steps,
    our_command,
    our_flags,
    parse,
    peer_command,
    report,
)
from openrlhf.cluster.ray_cluster import expected_machines
from openrlhf.config.options import parse_config
from openrlhf.launch.start import plan_placement
from tests.config.commands import ROOTS
from tests.config.conftest import gpu_machine  # noqa: F401
from tests.ranks import ROOT
from tests.tiny import save_reward_model, save_tiny_model

PAPER = ROOT / "benchmarks/paper"
CASES = [(*names, *length) for names in SIZES for length in ([], ["--length", "8192"])]
CASES = [each for each in CASES if each[0] == "dapo" or len(each) == 2]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def a_case(name: str, size: str, *more: str) -> Case:
    return case_of(parse([name, "--size", size, *more]))


# ---- our side


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_our_configuration_is_accepted_on_the_machine_of_the_comparison(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu_machine: Callable[..., None],  # noqa: F811
) -> None:
    case = a_case(*words)
    gpu_machine(case.gpus, flash_attention=False)
    for path in (case.data(tmp_path) / "prompts.jsonl", tmp_path / "models/reward/config.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(ROOT)
    words = our_command(case, tmp_path, tmp_path / "run")[3:]
    config = parse_config(ROOTS["train_ppo_ray"], words, command="train_ppo_ray")
    assert config.rollout.batch_size == case.prompts
    assert config.rollout.n_samples_per_prompt == case.samples
    assert config.rollout.max_new_tokens == case.length
    assert config.actor.num_gpus_per_node == config.vllm.num_engines == case.gpus
    machines = expected_machines(on_gpus=True, declared=f"1x{case.gpus}")
    plan_placement(config, "cuda").check(machines)  # raises PlacementError if the run does not fit


def workspace(folder: Path, case: Case) -> dict[str, object]:
    """Write a tiny model and prompts; return flags that replace the real model and prompts."""
    model = Path(
        save_tiny_model(folder / "tiny", chat_template=TEMPLATE, max_position_embeddings=16384)
    )
    question: Any = "how much is 1+1?"
    if case.name != "ppo":
        question = [{"role": "user", "content": question}]
    rows = [{"prompt": question, "answer": "2"}] * 1024
    data.write_json_lines(case.data(folder) / "prompts.jsonl", rows)
    if case.name == "ppo":
        save_reward_model(folder / "models/reward", model)
    return {"actor.model_name_or_path": model}


@pytest.mark.verify
@pytest.mark.parametrize("name", list(SHAPES))
def test_our_dry_run_plans_for_the_papers_machine(name: str, tmp_path: Path) -> None:
    """The dry run loads a tiny model and the rows, and calls the reward."""
    case = a_case(name, "paper")
    words = our_command(case, tmp_path, tmp_path / "run")
    for flag, value in workspace(tmp_path, case).items():
        words[words.index(f"--{flag}") + 1] = str(value)
    words += ["--dry_run", "--placement.cluster", "1x8"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 process(es)" in done.stdout
    assert f"of {case.prompts} prompts" in done.stdout


def test_our_dapo_flags_scale_with_the_response_length() -> None:
    flags = our_flags(a_case("dapo", "paper", "--length", "4096"), Path("f"), Path("f/run"))
    assert flags["rollout.max_new_tokens"] == 4096
    assert flags["data.max_len"] == 5120 and flags["reward.overlong_buffer_len"] == 1024


# ---- the peers' side


@pytest.mark.parametrize("script", sorted(PAPER.glob("*/*.sh")), ids=lambda path: path.name)
def test_shell_script_of_each_peer_is_valid(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def values(words: list[str]) -> dict[str, str]:
    """Return the values that follow each flag."""
    return dict(pairwise(words))


def test_peer_commands_get_the_sizes_of_the_case() -> None:
    trl = values(peer_command(a_case("gsm8k", "one-gpu"), Path("f"), Path("p"), Path("e")))
    assert trl["--num_processes"] == trl["--gpus"] == "1" and trl["--steps"] == "13"
    assert trl["--model"] == SIZES["gsm8k", "one-gpu"]["model"]
    verl = peer_command(
        a_case("dapo", "paper", "--length", "2048"), Path("f"), Path("p"), Path("e")
    )
    assert verl[-4:] == ["8", "20", "2048", "128"]
    chat = peer_command(a_case("ppo", "paper"), Path("f"), Path("p"), Path("e"))
    assert chat[-1] == "8" and "f/models/deepspeed_chat" in chat


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_deepspeed_chat_generates_1024_prompts_between_updates_of_128(
    gpus: int, tmp_path: Path
) -> None:
    """The script computes the numbers itself, so it runs here with a fake launcher."""
    chat = tmp_path / "environment/source/applications/DeepSpeed-Chat"
    (chat / "training/step3_rlhf_finetuning").mkdir(parents=True)
    launcher = tmp_path / "environment/bin/deepspeed"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    rows = tmp_path / "rows"
    data.write("ppo", rows, [{"prompt": " Hi"}])
    (tmp_path / "reward").mkdir()
    words = ["bash", PAPER / "ppo/deepspeed_chat.sh", tmp_path / "environment", "llama"]
    words += [tmp_path / "reward", rows / "deepspeed_chat", tmp_path / "out", str(gpus)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    flags = values(done.stdout.splitlines())
    per_round = int(flags["--per_device_generation_batch_size"]) * gpus
    assert per_round * int(flags["--generation_batches"]) == 1024
    update = int(flags["--per_device_training_batch_size"]) * gpus
    assert update * int(flags["--gradient_accumulation_steps"]) == 128
    assert (chat / "data/train.json").read_text() == (
        rows / "deepspeed_chat/train.json"
    ).read_text()


@pytest.mark.parametrize(
    ("model", "tokens", "rows"),
    [
        ("meta-llama/Llama-2-7b-hf", 32000, 32008),
        ("princeton-nlp/Sheared-LLaMA-1.3B", 32000, 32000),
        ("facebook/opt-1.3b", 50265, 50272),
    ],
)
def test_reward_model_for_deepspeed_chat_has_the_rows_that_it_expects(
    model: str, tokens: int, rows: int
) -> None:
    assert padded_rows(model, tokens) == rows


# ---- data and grading


def test_every_framework_gets_the_same_prompts_and_answers(tmp_path: Path) -> None:
    from datasets import load_dataset

    problem = {
        "prompt": [{"role": "user", "content": "2+3?"}],
        "reward_model": {"ground_truth": "5", "style": "rule"},
    }
    rows = data.dapo_rows([problem, problem])
    data.write("dapo", tmp_path, rows)
    [ours] = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    published: Any = load_dataset(
        "parquet", data_files=str(tmp_path / "prompts.parquet"), split="train"
    )
    [theirs] = published
    assert theirs["prompt"] == ours["prompt"] == problem["prompt"]
    assert theirs["reward_model"]["ground_truth"] == ours["answer"] == "5"


def test_deepspeed_chat_adds_the_space_that_our_prompts_have(tmp_path: Path) -> None:
    rows = data.ppo_rows([{"prompt": "\n\nHuman: Hi\n\nAssistant:"}] * 2)
    data.write("ppo", tmp_path, rows)
    [theirs] = [
        json.loads(line)
        for line in (tmp_path / "deepspeed_chat/train.json").read_text().splitlines()
    ]
    assert rows == [{"prompt": " " + theirs["prompt"]}]


def test_gsm8k_rows_of_the_published_file_have_numbers_as_answers(data_dir: Path) -> None:
    lines = (data_dir / "gsm8k/train.jsonl").read_text().splitlines()
    rows = data.gsm8k_rows(json.loads(line) for line in lines)
    assert len(rows) == 7473
    assert all(is_right(f"So it is {row['answer']}.", row["answer"]) == 1 for row in rows)


def test_prompts_that_are_too_long_are_excluded(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        save_tiny_model(tmp_path / "model", chat_template=TEMPLATE)
    )
    chats = [{"prompt": [{"role": "user", "content": "a" * length}]} for length in (4, 5)]
    texts = [{"prompt": "a" * length} for length in (4, 5)]
    assert data.short_enough(chats, tokenizer, 4) == chats[:1]
    assert data.short_enough(texts, tokenizer, 4) == texts[:1]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("3 + 4 = 7", "7", 1.0),
        ("It costs $1,200.", "1200", 1.0),
        ("x = -3.0", "-3", 1.0),
        ("7 is wrong, so 8", "7", 0.0),
        ("no number", "7", 0.0),
    ],
)
def test_all_frameworks_give_a_response_the_same_grade(
    response: str, label: str, reward: float
) -> None:
    prompt = "What is 5 + 6?"
    assert is_right(response, label) == reward
    assert reward_func([prompt + response], [prompt], [label])["rewards"] == [reward]
    message = [{"role": "assistant", "content": response}]
    assert trl_reward([message], answer=[label], prompts=[]) == [reward]
    assert compute_score("paper", response, label) == {"score": reward, "acc": reward}


# ---- measurements


def log_of(path: Path, lines: list[str]) -> Path:
    """Write a log with lines at 0, 10, 30 and 60 seconds."""
    times = (0.0, 10.0, 30.0, 60.0)
    stamped = [f"[{time:.2f}] {line}" for time, line in zip(times, lines, strict=True)]
    path.write_text("\n".join(["no time: a line that another process wrote", *stamped]) + "\n")
    return path


def test_step_times_of_each_peer_are_read_from_its_log(tmp_path: Path) -> None:
    trl = [
        "paper " + json.dumps({"step": step, "response_length": 50.0, "reward": 0.1})
        for step in range(4)
    ]
    verl = [
        f"(TaskRunner pid=7) step:{step} - actor/lr:1e-06 - response_length/mean:50.0 - perf/x:1"
        for step in range(4)
    ]
    chat = [
        f"Epoch: 0 | Step: {step} | PPO Epoch: 1 | Actor Loss: 0.1 | Critic Loss: 0.2 | "
        "Unsupervised Loss: 0.0"
        for step in range(4)
    ]
    for read, lines, per_second in (
        (trl_marks, trl, 8 * 50 * 2 / 50),
        (verl_marks, verl, 8 * 50 * 2 / 50),
        (deepspeed_chat_marks, chat, None),
    ):
        marks = read(log_of(tmp_path / "log", lines), samples=8)
        summary = summarize(marks, warm_up=2)
        assert summary.seconds == (20.0, 30.0) and summary.mean_s == 25
        assert summary.samples_per_second == 16 / 50
        assert summary.tokens_per_second == per_second


def test_our_step_times_are_read_from_the_metrics_of_the_run(tmp_path: Path) -> None:
    rows = [
        {"time": time, "rollout/num_samples": 8, "rollout/response_length_mean": 50.0}
        for time in (100.0, 110.0, 130.0)
    ]
    rows.insert(1, {"time": 105.0, "eval/eval_loss": 1.0})
    data.write_json_lines(tmp_path / "metrics.jsonl", rows)
    summary = summarize(our_marks(tmp_path / "metrics.jsonl"), warm_up=1)
    assert summary.seconds == (10.0, 20.0) and summary.tokens_per_second == 2 * 8 * 50 / 30
    assert has_steps(tmp_path / "metrics.jsonl", 3) and not has_steps(tmp_path / "metrics.jsonl", 4)


@pytest.mark.parametrize(("marks", "warm_up"), [(3, 3), (0, 1), (5, 0)])
def test_summary_without_measured_step_or_warm_up_raises_an_error(marks: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match="step"):
        summarize([Mark(time=float(number)) for number in range(marks)], warm_up)


def test_report_shows_the_ratio_of_the_mean_step_times() -> None:
    ours = summarize([Mark(time=time, samples=4, tokens=100) for time in (0, 10, 20)], 1)
    peer = summarize([Mark(time=time, samples=4) for time in (0, 30, 60)], 1)
    text = report(a_case("ppo", "one-gpu"), {"ours": [ours], "DeepSpeed-Chat": [peer]})
    assert "3.00" in text and "10 tokens/s" in text and "tokens not reported" in text


def test_command_output_is_timestamped_and_shown_after_a_failure(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('step', flush=True); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"exited with 3[\s\S]*step"):
        run(words, tmp_path / "log", environment={}, timeout_s=60)


def test_command_is_stopped_after_enough_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import time\nfor i in range(600): print('step', i, flush=True); time.sleep(0.1)"
    run(
        [sys.executable, "-c", code],
        log,
        environment={},
        timeout_s=60,
        is_enough=lambda: "step 2" in log.read_text(),
    )
    assert "step 2" in log.read_text() and "step 599" not in log.read_text()


def test_every_comparison_has_a_size_for_the_paper_and_for_one_gpu() -> None:
    assert set(SIZES) == {(name, size) for name in SHAPES for size in ("paper", "one-gpu")}
