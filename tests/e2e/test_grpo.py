"""End-to-end tests of GRPO on Ray, vLLM and DeepSpeed.

The tests cover uninterrupted and resumed runs, different layouts, and failing rewards.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.checkpoints.manifest import CheckpointError
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.options import ConfigError, parse_config
from openrlhf.evaluation.runs import run_evaluation
from openrlhf.observability.glossary import GLOSSARY
from openrlhf.observability.run_folder import read_lines
from openrlhf.rewards.graders import grade_math
from tests.e2e.commands import (
    as_arguments,
    column,
    finish,
    kill_when,
    launch,
    numbers,
    places,
    run,
    samples,
    small_grpo,
    steps_logged,
    train_here,
    write_rows,
)
from tests.e2e.processes import Process, descendants, survivors
from tests.reward_server import reward_server
from tests.tiny import HEADS, save_reward_model, save_tiny_model, sayable

REWARDS = Path(__file__).parent / "reward_files"
PROMPTS, BATCH, SAMPLES = 24, 4, 4
STEPS = PROMPTS // BATCH
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def words(count: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [
        {
            "input": "".join(draw.choices("bcdefgh", k=draw.randint(1, 6))) + "=",
            "label": f"label {number}",
            "datasource": "words",
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create the module's model, prompts and datasets cache."""
    save_tiny_model(
        own_folder / "model", chat_template=CHAT_TEMPLATE, max_position_embeddings=1024, **HEADS
    )
    write_rows(own_folder / "prompts.jsonl", words(PROMPTS, seed=1))
    write_rows(own_folder / "held_out.jsonl", words(5, seed=2))
    return own_folder


def grpo_flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return flags for six steps of four prompts with four samples each.

    Samples have at most eight tokens, and all episodes are written to samples.jsonl.
    """
    return {
        **small_grpo(workspace, folder, prompts=BATCH, samples=SAMPLES),
        "data.label_key": "label",
        "reward.remote_url": REWARDS / "letters.py",
        "train.colocate_actor_ref": True,
        "actor.adam.lr": 1e-2,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0.0,
        "actor.entropy_coef": 0.0,
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        **changes,
    }


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    """Complete a run without interruption. The run starts Ray itself."""
    folder = workspace / "whole"
    flags = grpo_flags(
        workspace,
        folder,
        **{
            "eval.dataset": workspace / "held_out.jsonl",
            "eval.steps": 2,
            "eval.at_start": True,
            "eval.temperature": 1.0,
            "eval.n_samples_per_prompt": 2,
            "ckpt.save_steps": 2,
            "train.enable_ema": True,
            "train.ema_beta": 0.5,
        },
    )
    run("train_ppo_ray", flags)
    return folder


# ---- one run


def test_every_step_is_logged_and_followed_by_its_evaluation(whole: Path) -> None:
    lines = [(row["step"], "eval/eval_num_samples" in row) for row in numbers(whole)]
    steps = [(step, False) for step in range(1, STEPS + 1)]
    assert lines == [
        (0, True),
        *steps[:2],
        (2, True),
        *steps[2:4],
        (4, True),
        *steps[4:],
        (6, True),
    ]


def test_every_metric_is_finite_and_documented(whole: Path) -> None:
    for row in numbers(whole):
        for name, value in row.items():
            assert value is not None and math.isfinite(value), (name, row["step"])
            known = name == "step" or name == "train/digits" or name.startswith("eval/eval_words_")
            assert known or name in GLOSSARY, name


def test_engine_and_trainer_logprobs_agree_in_every_step(whole: Path) -> None:
    """The logprob gap, in nats per token, stays small after each publication.

    Step k + 1 samples with the weights published by step k.
    """
    assert len(column(whole, "train/logprob_gap_mean")) == STEPS
    assert max(column(whole, "train/logprob_gap_mean")) < 1e-5
    assert max(column(whole, "train/logprob_gap_max")) < 1e-4


def test_unneeded_forward_passes_are_skipped_and_all_other_passes_are_timed(
    whole: Path,
) -> None:
    """The run is strictly on-policy and has its KL penalty in the loss.

    Only π_ref needs its own forward pass, because the training forward pass yields π_old.
    """
    steps = [row for row in read_lines(whole / "metrics.jsonl") if "train/reward" in row]
    for row in steps:
        assert 0 < row["timing/ref_logprobs"] < row["timing/make_experience"]
        assert not {"timing/old_logprobs", "timing/teacher_logprobs", "timing/values"} & set(row)


def test_policy_and_kl_change_during_training(whole: Path) -> None:
    kl = column(whole, "train/kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-3
    start = AutoModelForCausalLM.from_pretrained(whole.parent / "model").state_dict()
    end = AutoModelForCausalLM.from_pretrained(whole / "model").state_dict()
    assert start.keys() == end.keys()
    assert all(end[name].isfinite().all() for name in end)
    assert max(float((end[name] - start[name]).abs().max()) for name in end) > 0.02


def test_samples_file_contains_every_sample_with_the_inputs_of_its_reward(whole: Path) -> None:
    rows = samples(whole)
    assert len(rows) == PROMPTS * SAMPLES
    expected = {row["input"] for row in words(PROMPTS, seed=1)}
    assert {row["prompt"] for row in rows} == expected
    assert len({(row["prompt_index"], row["sample_index"]) for row in rows}) == len(rows)
    for row in rows:
        share = row["response"].count("a") / len(row["response"])
        assert row["reward"] == pytest.approx(share), row
        assert row["scores"]["score"] == float(share > 0)
        assert row["weight_versions"] == [row["step"] - 1]
        assert row["stop_reason"] == ("stop" if row["response"].endswith("<eos>") else "length")


def test_step_metrics_match_the_samples_of_the_step(whole: Path) -> None:
    rows = samples(whole)
    for step, reward in enumerate(column(whole, "train/reward"), 1):
        mine = [row for row in rows if row["step"] == step]
        assert reward == pytest.approx(sum(row["reward"] for row in mine) / len(mine), abs=1e-6)
    digits = [sum(map(str.isdigit, row["response"])) for row in rows]
    assert sum(column(whole, "train/digits")) / STEPS == pytest.approx(sum(digits) / len(digits))


def test_run_writes_a_report_an_export_checkpoints_and_logs(whole: Path) -> None:
    assert (whole / "report.html").stat().st_size > 10_000
    assert AutoTokenizer.from_pretrained(whole / "model")("1+2").input_ids == [5, 40, 6]
    tags = {
        path.name.removesuffix(".manifest.json") for path in (whole / "checkpoints").glob("*.json")
    }
    assert {"global_step2", "global_step4", "global_step6"} <= tags
    assert any(path.name.startswith("actor+ref-0") for path in (whole / "logs").iterdir())


# ---- killed runs


def test_killed_run_leaves_no_processes_and_resumes_with_the_same_metrics(
    whole: Path, workspace: Path
) -> None:
    """The run uses the configuration file and the seed of the uninterrupted run.

    All logged metrics are identical to the last digit.
    """
    folder = workspace / "killed"
    flags = {"config": whole / "config.yaml", **places(folder)}
    process = launch("train_ppo_ray", flags)
    started: list[Process] = []

    def three_steps_done() -> bool:
        if steps_logged(folder) < 3:
            return False
        started.extend(descendants(process.pid))
        return True

    kill_when(process, three_steps_done)
    before = numbers(folder)
    assert before == numbers(whole)[: len(before)]
    assert steps_logged(folder) < STEPS
    agents = [process for process in started if process.command.endswith("Agent")]
    ours = [process for process in started if process not in agents]
    assert any("isolation.program" in process.command for process in ours)
    assert any("WorkerHost" in process.command for process in ours)
    assert survivors(ours, within=30) == []
    run("train_ppo_ray", {**flags, "run.dir": None, "ckpt.load_enable": True})
    assert numbers(folder) == numbers(whole)
    assert samples(folder) == samples(whole)
    weights, unbroken = (path / "model" / "model.safetensors" for path in (folder, whole))
    assert weights.read_bytes() == unbroken.read_bytes()
    # Two Ray processes wait a minute for their control plane before they exit.
    assert survivors(agents, within=90) == []


# ---- runs that cannot continue


def test_too_many_failed_rewards_end_the_run_with_the_traceback_of_the_user_code(
    workspace: Path,
) -> None:
    folder = workspace / "broken"
    flags = grpo_flags(
        workspace,
        folder,
        **{"reward.remote_url": REWARDS / "trouble.py", "reward.max_error_rate": 0.0},
    )
    done = run("train_ppo_ray", flags, status=2)
    assert "error: " in done.errors
    assert re.search(
        r"\d of (4|8|12|16) episodes failed", done.errors
    )  # a batch with too many failures is aborted early
    assert "--reward.max_error_rate 0" in done.errors
    assert "ValueError: sevens are bad luck" in done.errors
    assert 'trouble.py", line' in done.errors  # where the error was raised
    assert "RewardErrors" not in done.errors  # internal stack frames are hidden
    failures = [row for row in samples(folder) if row["stop_reason"] == "failed"]
    assert failures and all("sevens are bad luck" in row["error"] for row in failures)


def test_dry_run_prints_the_plan_and_the_prompts_without_starting_processes(
    workspace: Path,
) -> None:
    folder = workspace / "dry"
    done = run("train_ppo_ray", grpo_flags(workspace, folder, dry_run=True))
    assert (
        "actor, ref: 1 process(es): 1 on this machine\nvllm: 1 process(es): 1 on this machine\n"
        in done.printed
    )
    assert f"{PROMPTS} prompts, {STEPS} step(s) of {BATCH} prompts" in done.printed
    assert done.printed.count("--- prompt of row ") == 2, done.printed
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "end", "status", "said"),
    [
        pytest.param(
            {"data.label_key": "lable"},
            None,
            2,
            "no column 'lable'",
            id="a mistake in the data",
            marks=pytest.mark.verify,
        ),
        pytest.param({}, signal.SIGTERM, 143, "terminated", id="a termination"),
    ],
)
def test_run_that_ends_during_startup_leaves_no_processes(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    end: signal.Signals | None,
    status: int,
    said: str,
) -> None:
    folder, started, sessions = workspace / f"ended-{status}", set[Process](), set[Path]()
    with TemporaryDirectory(
        dir="/tmp"
    ) as ray_folder:  # pytest's temporary paths are too long for Ray's sockets
        monkeypatch.setenv("RAY_TMPDIR", ray_folder)
        process = launch("train_ppo_ray", grpo_flags(workspace, folder, **changes))
        deadline = time.monotonic() + 400
        while process.poll() is None and time.monotonic() < deadline:
            started.update(descendants(process.pid))
            sessions.update(Path(ray_folder).rglob(f"session_*_{process.pid}"))
            if end and any("RolloutEngine" in each.command and each.running for each in started):
                process.send_signal(end)  # repeating the signal must not change the result
            time.sleep(0.2)
        done = finish(process)
        assert (done.status, survivors(started, within=30)) == (status, []), done.errors
        assert said in done.errors and any("raylet" in each.command for each in started)
        assert sessions and (
            end or not (folder.exists() or any(session.exists() for session in sessions))
        )


# ---- runs in this process, on a shared Ray cluster


@pytest.fixture(scope="module")
def cluster(whole: Path) -> Iterator[None]:
    """Start Ray after `whole` is complete, because `whole` must find no running cluster."""
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_zero3_with_two_ranks_and_two_engines_gives_the_same_result_as_one_rank(
    whole: Path, workspace: Path
) -> None:
    """The losses agree to 1e-4, and the sampled tokens are identical.

    Sums are computed in a different order, and AdamW steps amplify the differences.
    """
    folder = workspace / "spread"
    changes = {
        "actor.num_gpus_per_node": 2,
        "ref.num_gpus_per_node": 2,
        "vllm.num_engines": 2,
        "train.colocate_actor_ref": None,
        "ds.zero_stage": 3,
        "ds.packing_samples": True,
    }
    train_here(grpo_flags(workspace, folder, **changes))
    assert [row["response"] for row in samples(folder)] == [
        row["response"] for row in samples(whole)
    ]
    assert {path.name for path in (folder / "logs").glob("*-?.log")} >= {
        *("actor-0.log", "actor-1.log", "ref-0.log", "ref-1.log")
    }
    check_same(folder, whole)


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("stages", [(2, 1), (3, 3)])
def test_run_resumes_on_a_different_number_of_ranks(
    whole: Path, workspace: Path, stages: tuple[int, int]
) -> None:
    folder = workspace / f"cut{stages}"
    flags = grpo_flags(workspace, folder, **{"ckpt.save_steps": 2, "ckpt.max_num": 9})
    train_here(
        {
            **flags,
            "actor.num_gpus_per_node": 2,
            "ds.zero_stage": stages[0],
            "ref.num_gpus_per_node": 2,
        }
    )
    for path in (folder / "checkpoints").glob("global_step*.manifest.json"):
        if path.name != "global_step2.manifest.json":
            path.unlink()
    shutil.rmtree(folder / "model")
    train_here(
        {
            **flags,
            "ds.zero_stage": stages[1],
            "ds.use_universal_ckpt": True,
            "ckpt.load_enable": True,
        }
    )
    assert [row["response"] for row in samples(folder)] == [
        row["response"] for row in samples(whole)
    ]
    check_same(folder, whole)


def notes(folder: Path) -> list[str]:
    """Return the sleep and wake-up lines from the logs of engines and models, in time order."""
    lines = [
        line for log in (folder / "logs").glob("*-0.log") for line in log.read_text().splitlines()
    ]
    timed = [line.split(" ", 1) for line in lines if re.match(r"\d{10}\.\d{3} ", line)]
    return [what for _, what in sorted(timed, key=lambda line: float(line[0]))]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.verify), 3])
def test_colocated_models_and_engines_that_sleep_in_turn_give_the_same_result_as_separate_ones(
    whole: Path, workspace: Path, stage: int
) -> None:
    """An engine with two workers shares the devices of two ranks.

    The reference is offloaded to CPU memory.
    """
    folder = workspace / f"hybrid-{stage}"
    changes = {
        "train.colocate_all": True,
        "train.colocate_actor_ref": None,
        "vllm.enable_sleep": True,
        "ds.enable_sleep": True,
        "ref.offload": True,
        "actor.num_gpus_per_node": 2,
        "vllm.tensor_parallel_size": 2,
        "ds.zero_stage": stage,
        "eval.dataset": workspace / "held_out.jsonl",
        "eval.steps": 3,
    }
    train_here(grpo_flags(workspace, folder, **changes))
    assert [row["response"] for row in samples(folder)] == [
        row["response"] for row in samples(whole)
    ]
    check_same(folder, whole)
    engine_wakes = ["engine 0 awake: weights", "engine 0 awake: kv_cache"]
    rollout = [
        *engine_wakes[1:],
        "engine 0 asleep",
    ]  # the engine's weights stay in memory after publication
    update = ["actor awake", "actor asleep", *engine_wakes[:1]]
    start = ["engine 0 asleep", "actor asleep", *engine_wakes[:1]]
    steps = [*rollout, *update] * 2
    assert notes(folder)[: len(start) + len(steps)] == start + steps
    assert (
        notes(folder).count("actor awake") == STEPS + 3
    )  # three extra wake-ups for two best checkpoints and the export
    assert notes(folder).count("engine 0 asleep") == 1 + STEPS + 2  # 2 evaluations


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_colocated_critic_and_reward_models_with_offload_give_the_same_result(
    workspace: Path,
) -> None:
    reward = save_reward_model(workspace / "reward", workspace / "model")
    common = {
        "algo.advantage.estimator": "gae",
        "reward.remote_url": None,
        "reward.model_name_or_path": reward,
        "algo.kl.use_loss": None,
        "algo.kl.estimator": "k1",
        "data.max_samples": 3 * BATCH,
    }
    apart, together = workspace / "apart", workspace / "together"
    train_here(grpo_flags(workspace, apart, **common))
    changes = {
        "train.colocate_all": True,
        "train.colocate_actor_ref": None,
        "vllm.enable_sleep": True,
        "ds.adam_offload": True,
        "ref.offload": True,
        "reward.offload": True,
    }
    train_here(grpo_flags(workspace, together, **common, **changes))
    assert [row["response"] for row in samples(together)] == [
        row["response"] for row in samples(apart)
    ]
    check_same(together, apart)
    assert column(together, "train/critic_loss") == pytest.approx(
        column(apart, "train/critic_loss"), abs=1e-4
    )


@pytest.mark.usefixtures("cluster")
def test_openrlhf_eval_reproduces_the_metrics_logged_in_training(
    whole: Path, workspace: Path
) -> None:
    shared = (
        "data.label_key",
        "data.max_len",
        "reward.remote_url",
        "rollout.max_new_tokens",
        "rollout.batch_size",
        "ds.param_dtype",
    )
    flags = {
        name: value
        for name, value in grpo_flags(workspace, workspace / "evaluated").items()
        if name in shared
    } | {
        "model.model_name_or_path": workspace / "model",
        "eval.dataset": workspace / "held_out.jsonl",
        "eval.temperature": 1.0,
        "eval.n_samples_per_prompt": 2,
        "run.dir": workspace / "evaluated",
    }
    run_evaluation(parse_config(EvaluationConfig, as_arguments(flags), command="eval"))
    assert numbers(workspace / "evaluated") == [row for row in numbers(whole) if row["step"] == 0]


@pytest.mark.usefixtures("cluster")
def test_stop_strings_and_stop_tokens_end_responses_and_are_kept_in_the_text(
    workspace: Path,
) -> None:
    folder = workspace / "stops"
    ids = AutoTokenizer.from_pretrained(workspace / "model").convert_tokens_to_ids(["d", "e"])
    stops = {"rollout.stop": ["b", "c"], "rollout.stop_token_ids": ids}
    train_here(grpo_flags(workspace, folder, **{"data.max_samples": BATCH, **stops}))
    responses = [
        re.sub(r"<\w+>", "·", row["response"]) for row in samples(folder)
    ]  # the characters of "<bos>" are not tokens
    assert not any(set(response[:-1]) & set("bcde") for response in responses)
    assert {"b", "c"} & {response[-1] for response in responses}
    assert {"d", "e"} & {response[-1] for response in responses}
    assert max(column(folder, "train/logprob_gap_mean")) < 1e-5


def check_same(folder: Path, other: Path) -> None:
    names = ("train/reward", "train/return", "train/policy_loss", "train/kl", "train/entropy_loss")
    for name in (*names, "train/ppo_kl", "train/ppo_clip_ratio", "train/response_length"):
        assert column(folder, name) == pytest.approx(column(other, name), abs=1e-4), name
    norms = column(folder, "train/actor_grad_norm"), column(other, "train/actor_grad_norm")
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert max(column(folder, "train/logprob_gap_mean")) < 1e-5


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_several_optimizer_steps_per_batch_do_not_depend_on_the_layout(
    workspace: Path,
) -> None:
    """One rank with fixed micro-batch sizes is compared with two ranks that use a token limit.

    The KL penalty is part of the reward, the token limit is below --data.max_len, and the last
    batch is smaller.
    """
    common = {
        "data.max_samples": 11,
        "train.batch_size": 8,
        "train.max_epochs": 2,
        "algo.kl.use_loss": None,
        "algo.kl.estimator": "k1",
        "algo.kl.init_coef": 0.1,
        "algo.advantage.estimator": "reinforce",
        "actor.entropy_coef": 0.01,
    }
    one, two = workspace / "one", workspace / "two"
    train_here(grpo_flags(workspace, one, **common))
    budget = {
        "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": 11,
        "rollout.max_tokens_per_gpu": 10,
    }
    ranks = {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2}
    train_here(grpo_flags(workspace, two, **common, **budget, **ranks))
    assert column(one, "rollout/num_samples") == [16.0, 16.0, 12.0]
    check_same(two, one)
    # π_old is recomputed, so the ratio is no longer 1 after the first optimizer step of a batch.
    assert all(abs(value) > 1e-6 for value in column(one, "train/ppo_kl"))
    # The returns include the KL penalty, so they are below the rewards once the policy has changed.
    assert column(one, "train/kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(column(one, "train/kl")[-1]) > 1e-4


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3-moe", {"algo.advantage.estimator": "gae", "ds.packing_samples": True}),
        pytest.param(
            "mixtral",
            {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "ds.zero_stage": 3},
            marks=pytest.mark.verify,
        ),
    ],
)
def test_mixture_of_experts_is_balanced_and_published(
    workspace: Path, kind: str, changes: dict[str, Any]
) -> None:
    """The policy and the critic are trained, and all experts are published to the engine.

    Trainer and engine compute the same log-probabilities for the sampled tokens.
    """
    folder = workspace / f"run-{kind}"
    model = save_tiny_model(workspace / kind, kind, chat_template=CHAT_TEMPLATE, **HEADS)
    common = {
        "actor.model_name_or_path": model,
        "actor.aux_loss_coef": 1.0,
        "data.max_samples": 2 * BATCH,
    }
    train_here(grpo_flags(workspace, folder, **common, **changes))
    assert len(column(folder, "train/logprob_gap_mean")) == 2
    assert max(column(folder, "train/logprob_gap_mean")) < 1e-5
    losses = [column(folder, name) for name in ("train/aux_loss", "train/critic_aux_loss")]
    for balance in losses if "algo.advantage.estimator" in changes else losses[:1]:
        assert len(balance) == 2 and all(
            1 < value < 8 for value in balance
        )  # the loss is 2 if the 8 experts are balanced


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_initial_policy_is_exported_if_training_brings_no_improvement_within_the_patience(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metric never changes, so the initial evaluation stays the best evaluation.

    The initial weights are restored exactly.
    """
    folder = workspace / "patient"
    waits = {
        "eval.steps": 1,
        "eval.at_start": True,
        "eval.patience": 2,
        "ckpt.best_metric_key": "eval_num_samples",
    }
    train_here(
        grpo_flags(workspace, folder, **waits, **{"eval.dataset": workspace / "held_out.jsonl"})
    )
    assert [row["step"] for row in numbers(folder) if "eval/eval_num_samples" in row] == [0, 1, 2]
    printed = capsys.readouterr().out
    assert (
        "--eval.patience 2 ends the run after step 2. The export contains the weights of step 0"
        in printed
    )
    assert column(folder, "train/kl")[-1] > 1e-6  # training changed the policy
    start, end = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (workspace / "model", folder / "model")
    )
    assert start.keys() == end.keys() and all(start[name].equal(end[name]) for name in start)


def troubled(workspace: Path, name: str, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Run a step of four prompts with a reward that raises on sevens; return folder and samples."""
    folder = workspace / name
    flags = {
        "reward.remote_url": REWARDS / "trouble.py",
        "data.max_samples": BATCH,
        "algo.kl.init_coef": 0.0,
        **changes,
    }
    train_here(grpo_flags(workspace, folder, **flags))
    return folder, samples(folder)


@pytest.mark.usefixtures("cluster")
def test_failed_rewards_below_the_error_rate_limit_are_counted_and_not_trained_on(
    workspace: Path,
) -> None:
    """A sample fails if its reward call raises. All four calls for one prompt hang."""
    prompts = [row | {"label": "hang"} if i == 0 else row for i, row in enumerate(words(4, seed=1))]
    dataset = write_rows(workspace / "hanging.jsonl", prompts)
    changes = {"data.prompt_dataset": dataset, "reward.timeout": 1.0, "reward.max_error_rate": 0.9}
    folder, rows = troubled(workspace, "failing", **changes)
    assert len(rows) == BATCH * SAMPLES
    hung = [row for row in rows if row["prompt"] == prompts[0]["input"]]
    raised = [row for row in rows if row not in hung and "7" in row["response"]]
    assert len(hung) == SAMPLES and raised
    for row in rows:
        failed = row in hung or row in raised
        assert (row["stop_reason"] == "failed") == failed
        assert (row["reward"] is None) == failed and (row["error"] is not None) == failed
    assert all("took more than 1 s" in row["error"] for row in hung)
    assert all("ValueError: sevens are bad luck" in row["error"] for row in raised)
    assert {row["failure"] for row in hung} == {"timeout"} and {
        row["failure"] for row in raised
    } == {"exception"}
    assert column(folder, "train/failed_episodes") == [len(hung) + len(raised)]
    assert column(folder, "train/failed_timeout") == [len(hung)]
    assert column(folder, "train/failed_exception") == [len(raised)]
    good = Counter(row["prompt"] for row in rows if row["reward"] is not None)
    compared = [row for row in rows if row["reward"] is not None and good[row["prompt"]] > 1]
    assert column(folder, "rollout/num_samples") == [len(compared)]
    mean = sum(row["reward"] for row in compared) / len(compared)
    assert column(folder, "train/reward") == pytest.approx([mean], abs=1e-6)


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("policy", ["drop", "-0.5"])
def test_failed_rewards_are_dropped_or_replaced_at_any_error_rate(
    workspace: Path, policy: str
) -> None:
    changes = {"reward.on_error": policy, "reward.max_error_rate": 0.0}
    folder, rows = troubled(workspace, f"on_error_{policy}", **changes)
    raised = [row for row in rows if "7" in row["response"]]
    assert raised and all("sevens are bad luck" in row["error"] for row in raised)
    if policy == "drop":
        assert all(row["reward"] is None and row["stop_reason"] == "failed" for row in raised)
        assert column(folder, "train/failed_episodes") == [len(raised)]
    else:
        assert all(row["reward"] == -0.5 and row["stop_reason"] != "failed" for row in raised)
        assert column(folder, "train/failed_episodes") == [0.0]
        mean = sum(row["reward"] for row in rows) / len(rows)
        assert column(folder, "train/reward") == pytest.approx([mean], abs=1e-6)


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_reward_server_that_fails_is_no_longer_used(workspace: Path) -> None:
    folder = workspace / "served"
    with reward_server() as server:
        urls = f"{server.url}/get_reward, {server.url}/broken"
        train_here(
            grpo_flags(workspace, folder, **{"reward.remote_url": urls, "data.max_samples": BATCH})
        )
        asked = server.bodies
    rows = samples(folder)
    assert len(asked) >= len(rows) == BATCH * SAMPLES
    assert [row["reward"] for row in rows] == [row["response"].count("e") for row in rows]
    assert {len(body["query"]) for body in asked} == {1}
    assert column(folder, "train/letters") and column(folder, "train/failed_episodes") == [0.0]


@pytest.mark.usefixtures("cluster")
def test_reward_file_that_cannot_be_loaded_ends_the_run_before_models_load(
    workspace: Path,
) -> None:
    broken = workspace / "broken.py"
    broken.write_text("import a_package_that_is_not_there\n")
    folder = workspace / "unloadable"
    with pytest.raises(ConfigError) as caught:
        train_here(grpo_flags(workspace, folder, **{"reward.remote_url": broken}))
    assert "--reward.remote_url" in str(caught.value)
    assert "No module named 'a_package_that_is_not_there'" in str(caught.value)
    assert not list((folder / "logs").glob("actor*"))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ds.zero_stage": 3}, ["ZeRO stage 2", "ZeRO stage 3", "--ds.zero_stage"]),
        ({"data.max_samples": 20}, ["prompts of --data.prompt_dataset", "was 24, ", ", now 20, "]),
        ({"train.seed": 7}, ["--train.seed: was 42, now 7"]),
    ],
    ids=["another layout", "other prompts", "another order"],
)
def test_checkpoint_from_a_different_run_is_rejected_and_left_unchanged(
    whole: Path, workspace: Path, changes: dict[str, Any], words: list[str]
) -> None:
    flags = grpo_flags(workspace, workspace / "other", **changes)
    before = numbers(whole)
    with pytest.raises(CheckpointError) as caught:
        train_here({**flags, "ckpt.path": whole / "checkpoints", "ckpt.load_enable": True})
    assert all(word in str(caught.value) for word in words), caught.value
    assert numbers(whole) == before
    assert not (workspace / "other").exists()


@pytest.mark.usefixtures("cluster")
def test_gsm8k_chats_are_rendered_and_graded_by_the_math_verifier(
    workspace: Path, data_dir: Path
) -> None:
    """Each of the 16 questions is used once.

    Each question is rendered by the chat template and graded against an answer such as `#### 72`.
    """
    lines = (data_dir / "gsm8k/train.jsonl").read_text().splitlines()[:16]
    rows = [json.loads(line) for line in lines]
    chats = [
        {
            "messages": [{"role": "user", "content": sayable(row["question"])}],
            "answer": row["answer"],
        }
        for row in rows
    ]
    folder = workspace / "gsm8k"
    changes = {
        "data.prompt_dataset": write_rows(workspace / "gsm8k.jsonl", chats),
        "data.input_key": "messages",
        "data.label_key": "answer",
        "data.apply_chat_template": True,
        "data.max_len": 1024,
        "reward.remote_url": None,
        "reward.verifier": "math",
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 2,
        "algo.kl.init_coef": 0.0,
    }
    train_here(grpo_flags(workspace, folder, **changes))
    written = samples(folder)
    assert len(written) == 16 * 2
    labels = {f"user: {sayable(row['question'])}\nassistant: ": row["answer"] for row in rows}
    assert Counter(row["prompt"] for row in written) == dict.fromkeys(labels, 2)
    for row in written:
        assert row["error"] is None
        assert row["reward"] in (0.0, 1.0)
        assert row["reward"] == grade_math(row["response"], labels[row["prompt"]])
    assert column(folder, "train/failed_episodes") == [0.0] * 2


@pytest.mark.usefixtures("cluster")
def test_rejected_prompts_are_replaced_and_a_resumed_run_filters_the_same_prompts(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample scores 1 if it contains the letter a.

    A prompt is replaced if all or none of its samples contain an a.
    """
    monkeypatch.setattr("openrlhf.observability.recorder.SAMPLES_PER_STEP", 1000)
    folder = workspace / "filtered"
    changes = {
        "algo.dynamic_filtering_enable": True,
        "train.num_episodes": 2,
        "data.dataloader_num_workers": 1,
        "eval.dataset": workspace / "held_out.jsonl",
        "eval.steps": 1000,
        "ckpt.save_steps": 1,
    }
    flags = grpo_flags(workspace, folder, **changes)
    train_here(flags)
    rows, steps = samples(folder), steps_logged(folder)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["prompt_index"], []).append(row)
    assert sorted(groups) == list(range(2 * PROMPTS))  # every prompt was used once per epoch
    for group in groups.values():
        assert len(group) == SAMPLES
        mean = sum(row["scores"]["score"] for row in group) / SAMPLES
        assert {row["filtered"] for row in group} == {not 0 < mean < 1}
    assert {row["filtered"] for row in rows} == {True, False}
    for step in range(1, steps + 1):
        drawn = [index for index in sorted(groups) if groups[index][0]["step"] == step]
        # Samples rejected at the end of an epoch are written before the next step.
        tried = [groups[index] for index in drawn if index // PROMPTS == drawn[-1] // PROMPTS]
        kept = [group for group in tried if not group[0]["filtered"]]
        ends_episode = drawn[-1] % PROMPTS == PROMPTS - 1
        assert len(kept) == BATCH or (ends_episode and 0 < len(kept) < BATCH)
        assert column(folder, "train/dynamic_filtering_pass_rate")[step - 1] == 100 * len(
            kept
        ) / len(tried)
        assert column(folder, "rollout/num_samples")[step - 1] == len(kept) * SAMPLES
        rewards = [row["reward"] for group in kept for row in group]
        assert column(folder, "train/reward")[step - 1] == pytest.approx(
            sum(rewards) / len(rewards), abs=1e-6
        )
    assert 3 < steps < 2 * STEPS
    assert [row["step"] for row in numbers(folder) if "eval/eval_num_samples" in row] == [steps]

    before, weights = numbers(folder), (folder / "model" / "model.safetensors").read_bytes()
    for manifest in (folder / "checkpoints").glob(
        "*.json"
    ):  # simulates a kill two steps before the end
        if f"step{steps - 2}." not in manifest.name:
            manifest.unlink()
    train_here({**flags, "ckpt.load_enable": True})
    assert numbers(folder) == before
    assert samples(folder) == rows
    assert (folder / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.usefixtures("cluster")
def test_prompts_generated_ahead_record_the_weight_version_they_were_sampled_with(
    workspace: Path,
) -> None:
    folder = workspace / "ahead"
    train_here(
        grpo_flags(
            workspace,
            folder,
            **{"rollout.vllm_generate_batch_size": 2 * BATCH, "ckpt.save_steps": 1},
        )
    )
    assert steps_logged(folder) == STEPS
    assert {row["step"]: row["weight_versions"] for row in samples(folder)} == {
        1: [0], 2: [0], 3: [2], 4: [2], 5: [4], 6: [4],
    }  # fmt: skip
    gaps = column(folder, "train/logprob_gap_mean")
    assert (
        max(gaps[::2]) < 1e-5 < min(gaps[1::2])
    )  # the gap is small only for the weights used in sampling


# ---- long tests, run by `make verify`


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("packing", [None, True], ids=["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_combination_of_zero_stage_ranks_and_packing_gives_the_same_result(
    whole: Path, workspace: Path, stage: int, ranks: int, packing: bool | None
) -> None:
    folder = workspace / f"layout-{stage}-{ranks}-{packing}"
    changes = {
        "actor.num_gpus_per_node": ranks,
        "ref.num_gpus_per_node": ranks,
        "ds.zero_stage": stage,
        "ds.packing_samples": packing,
    }
    train_here(grpo_flags(workspace, folder, **changes))
    check_same(folder, whole)


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_repeatedly_killed_run_logs_the_same_metrics_as_an_uninterrupted_run(
    whole: Path, workspace: Path
) -> None:
    """The run is killed at a random time after its next step, again and again until it completes.

    The kill may happen during an evaluation or while a checkpoint is written.
    """
    folder, draw = workspace / "haunted", random.Random(0)
    flags = {"config": whole / "config.yaml", **places(folder), "ckpt.load_enable": True}
    flags |= {"ckpt.save_steps": 1}
    kills = 0
    while (logged := steps_logged(folder)) < STEPS - 2:
        process = launch("train_ppo_ray", flags)
        delay = 0.3 * draw.random()
        kill_when(process, lambda logged=logged: steps_logged(folder) > logged, delay=delay)
        kills += 1
    assert kills >= 2
    run("train_ppo_ray", flags)
    assert numbers(folder) == numbers(whole)
    assert samples(folder) == samples(whole)
