"""Tests for the first training texts that --dry_run prints for each offline command.

Target tokens are in brackets.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.decoders import Fuse
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, RunState
from openrlhf.cli.main import VERBS
from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import TokenRows
from openrlhf.data.shown import LONGEST, show_batch, show_text
from openrlhf.launch import offline
from openrlhf.training.layout import RankLayout
from tests.data.small import PLAIN_CHAT, build_tokenizer
from tests.tiny import save_tiny_model, tiny_config


def tokenizer_that_decodes() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has known ids and joins decoded tokens without spaces."""
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    tokenizer.backend_tokenizer.decoder = Fuse()
    return tokenizer


Show = Callable[..., str]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ok"}]
BAD = [CHAT[0], {"role": "assistant", "content": "no"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a language model with a tokenizer whose token ids are known."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_that_decodes()
    AutoModelForCausalLM.from_config(
        tiny_config("llama", vocab_size=len(tokenizer), eos_token_id=5)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def dry_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function that runs a command on rows and returns its output."""

    def show(task: str, rows: list[dict[str, Any]], flags: str = "") -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        line = (
            f"--model.model_name_or_path {model} --data.dataset {file} --train.batch_size 1 "
            f"--run.dir {tmp_path} --dry_run"
        )
        VERBS[task].run(f"{line} {flags}".split())
        return capsys.readouterr().out

    return show


def test_sft_dry_run_prints_every_turn_and_its_targets(dry_run: Show) -> None:
    turns = [*CHAT, CHAT[0], BAD[1] | {"loss": False}, *CHAT]
    printed = dry_run("sft", [{"messages": turns}], "--data.apply_chat_template --data.multiturn")
    assert "Template: --data.apply_chat_template." in printed
    assert (
        "--- text 1: 24 tokens, 5 targets, ids 3 74 5 8 4 106 … 74 5 8 4 106 5\n"
        "<|user|>a<|end|>\n<|assistant|>⟦ok<|end|>\n⟧<|user|>a<|end|>\n<|assistant|>no<|end|>\n"
        "<|user|>a<|end|>\n<|assistant|>⟦ok<|end|>⟧\n"
    ) in printed


def test_only_rank_0_prints_texts(dry_run: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert dry_run("sft", [{"input": "a", "output": "ok"}]) == ""


def test_run_with_missing_tracker_package_fails_before_the_reference_scores_rows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = SimpleNamespace(
        is_main=True,
        dp_size=1,
        layout=RankLayout(dp=1),
        config=DeepSpeedConfig(),
        broadcast=lambda value: value,
    )
    monkeypatch.setattr(offline, "Strategy", lambda *_, **__: strategy)
    monkeypatch.setattr(offline, "load_models", lambda *_: SimpleNamespace(strategy=strategy))
    monkeypatch.setattr(offline, "with_reference", pytest.fail)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "ok", "rejected": "no"}\n')
    line = (
        f"--model.model_name_or_path {model} --data.dataset {tmp_path}/rows.jsonl "
        "--train.batch_size 1 --ref.precompute"
    )
    words = f"{line} --run.dir {tmp_path}/run --logger.wandb.key mine".split()
    with pytest.raises(SystemExit):
        VERBS["dpo"].run(words)
    assert "wandb" in capsys.readouterr().err


def test_multiturn_training_has_targets_in_every_assistant_turn_of_a_chat(dry_run: Show) -> None:
    printed = dry_run("sft", [{"messages": [*CHAT, *CHAT]}], "--data.multiturn")
    assert printed.count("⟦ok<|end|>") == 2


def test_distillation_dry_run_prints_same_texts_as_sft(dry_run: Show, model: Path) -> None:
    printed = dry_run("kd", [{"input": "a", "output": "ok"}], f"--kd.teacher_model {model}")
    assert "Template: --data.input_template $'User: {}\\nAssistant: '." in printed
    assert "User: a\nAssistant: ⟦ok <|end|>⟧" in printed


def test_preference_dry_run_prints_both_texts_with_targets_and_margins(dry_run: Show) -> None:
    rows = [{"chosen": CHAT, "rejected": BAD}]
    printed = dry_run("dpo", rows)
    chosen = (
        "--- chosen 1: 7 tokens, 2 targets, ids 3 74 5 8 4 106 5\n"
        "<|user|>a<|end|>\n<|assistant|>⟦ok<|end|>⟧"
    )
    assert chosen in printed
    assert "--- rejected 1: 8 tokens, 3 targets," in printed
    assert "<|assistant|>⟦no<|end|>⟧" in printed
    printed = dry_run("rm", [rows[0] | {"margin": 0.5}])
    assert "--- chosen 1, margins 0.5: 7 tokens, 1 targets," in printed
    assert "<|assistant|>no⟦<|end|>⟧" in printed


def test_kto_labels_of_a_single_class_print_a_startup_notice(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps({"prompt": "a", "completion": "ok", "label": True}) + "\n") * 2)
    line = (
        f"--model.model_name_or_path {model} --data.dataset {file} --train.batch_size 2 "
        f"--run.dir {tmp_path} --dry_run"
    )
    VERBS["kto"].run(line.split())
    assert "--data.label_key label" in capsys.readouterr().err


def test_kto_dry_run_prints_labels_but_not_the_kl_rows(dry_run: Show) -> None:
    printed = dry_run(
        "kto", [{"prompt": "a", "completion": "ok", "label": True}] * 2, "--train.batch_size 2"
    )
    assert printed.count("--- ") == 2
    assert "--- answer 1, desirable 1: " in printed
    printed = dry_run(
        "kto", [{"prompt": "a", "chosen": "ok", "rejected": "no"}], "--train.batch_size 2"
    )
    assert printed.count("--- ") == 2
    assert "desirable 1: " in printed and "desirable 0: " in printed
    assert "User: a\nAssistant: ⟦no <|end|>⟧" in printed
    turns = "\n\nHuman: a\n\nAssistant:"
    printed = dry_run(
        "kto", [{"chosen": f"{turns} ok", "rejected": f"{turns} no"}], "--train.batch_size 2"
    )
    assert "Template: none" in printed and f"{turns}⟦ ok <|end|>⟧" in printed


@pytest.mark.parametrize(
    ("labels", "tokens", "shown"),
    [
        (["+", "-"], "", "⟦<think> = +⟧b⟦<think> = -⟧"),
        ([0.25, None], "--prm.reward_tokens + -", "⟦<think> = 0.25⟧b<think>"),
    ],
)
def test_prm_dry_run_prints_steps_with_labels(
    dry_run: Show, labels: list[Any], tokens: str, shown: str
) -> None:
    rows = [{"input": "a<think>b<think>", "label": labels}]
    printed = dry_run("prm", rows, f"--prm.placeholder_token <think> {tokens}")
    assert "Template: none" in printed
    assert f"a{shown}" in printed


def test_dry_run_prints_rows_of_first_step(dry_run: Show) -> None:
    """The expected row order is the order for seed 42."""
    rows = [{"input": str(number), "output": "ok"} for number in range(9)]
    first = torch.randperm(9, generator=torch.Generator().manual_seed(42)).tolist()[:2]
    printed = dry_run("sft", rows)
    assert [f"User: {number}\n" in printed for number in range(9)] == [
        number in first for number in range(9)
    ]


def test_prompt_has_no_targets_and_long_text_is_elided_in_the_middle() -> None:
    tokenizer = tokenizer_that_decodes()
    tokens = tokenizer("a" * LONGEST + "b" * LONGEST)["input_ids"]
    shown = show_text("prompt", tokens, tokenizer)
    assert shown.startswith(f"--- prompt: {2 * LONGEST} tokens, ids 74 74 74 74 74 74 … 75 75")
    assert shown.endswith("a" * 10 + " … " + "b" * (LONGEST // 2))


def test_brackets_enclose_each_contiguous_span_of_targets() -> None:
    tokenizer = tokenizer_that_decodes()
    batch = TokenRows.from_lists([[58, 106, 9, 106], [58]], [[False, True, False, True], [False]])
    shown = list(show_batch(batch, tokenizer, ["text", ""]))
    assert shown == ["--- text 1: 4 tokens, 2 targets, ids 58 106 9 106\nQ⟦ok⟧ ⟦ok⟧"]


@pytest.mark.parametrize(
    ("task", "flag"), [("dpo", "--ref.model_name_or_path"), ("kd", "--kd.teacher_model")]
)
def test_frozen_model_with_different_vocabulary_is_rejected(
    task: str, flag: str, dry_run: Show, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_model(tmp_path / "other")
    columns = "--data.input_key input --data.output_key output" if task == "kd" else ""
    with pytest.raises(SystemExit):
        dry_run(task, [], f"{columns} {flag} {other}")
    errors = capsys.readouterr().err
    assert f"{flag} {other} " in errors and "--model.model_name_or_path" in errors


def test_resumed_run_renders_rows_with_the_original_start_date(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint stores the date. The first run stops before it renders any rows."""
    written = Checkpoint(
        directory=tmp_path,
        tag="global_step1",
        nonce="",
        places=("global_step1",),
        sequence=1,
        files={},
        metric_key=None,
        metric_value=None,
        state=RunState(step=1, started="2027-01-15T12:00:00"),
    )
    strategy = SimpleNamespace(
        is_main=True,
        dp_size=1,
        layout=RankLayout(dp=1),
        config=DeepSpeedConfig(),
        broadcast=lambda value: value,
    )
    rendered: list[str] = []

    def stop(tokenizer: object, moment: str) -> list[str]:
        rendered.append(moment)
        raise UserError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(offline, "Strategy", lambda *_, **__: strategy)
    monkeypatch.setattr(CheckpointManager, "latest", lambda self: written)
    monkeypatch.setattr(offline.clock, "set_clock", stop)
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "output": "ok"}\n')
    line = (
        f"--model.model_name_or_path {model} --data.dataset {tmp_path}/rows.jsonl "
        "--ckpt.load_enable"
    )
    with pytest.raises(SystemExit):
        VERBS["sft"].run(line.split())
    assert rendered == ["2027-01-15T12:00:00"]


def test_dry_run_warns_if_there_is_no_checkpoint_to_resume(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "output": "ok"}\n')
    line = (
        f"--model.model_name_or_path {model} --data.dataset {tmp_path}/rows.jsonl "
        f"--train.batch_size 1 --run.dir {tmp_path}/run --ckpt.output_dir {tmp_path}/model "
        f"--ckpt.path {tmp_path}/nockpt --dry_run"
    )
    warning = f"No complete checkpoint in --ckpt.path {tmp_path}/nockpt"
    VERBS["sft"].run(line.split())
    assert warning not in capsys.readouterr().err
    VERBS["sft"].run([*line.split(), "--ckpt.load_enable"])
    assert warning in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


HOLD = """
import sys
from pathlib import Path
from openrlhf.locks import locked
with locked(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("flags", ["", "--ckpt.load_enable"])
def test_dry_run_rejects_run_folder_in_use_by_another_process(
    flags: str, dry_run: Show, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = f"--ckpt.path {tmp_path}/nockpt --ckpt.output_dir {tmp_path}/model"
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(SystemExit) as ended:
            dry_run("sft", [{"input": "a", "output": "ok"}], f"{places} {flags}")
        holder.kill()
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert f"--run.dir {tmp_path} is in use by process {holder.pid} " in errors
