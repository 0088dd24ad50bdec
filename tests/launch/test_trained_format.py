"""The text format recorded in an exported model is the default for later commands.

The tests cover every command and every text format.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.decoders import Fuse
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from openrlhf.checkpoints.manifest import RunState
from openrlhf.config.options import parse_config
from openrlhf.data.first_look import TextFormat, record, recorded
from openrlhf.data.first_start import FirstStart
from openrlhf.evaluation.batch_inference import load_rows as load_inference_rows
from openrlhf.evaluation.batch_inference import read_rows as read_inference_rows
from openrlhf.evaluation.journal import Journal, start_of_request
from openrlhf.evaluation.runs import read_candidate
from openrlhf.launch.offline import load_rows
from openrlhf.launch.prompt_data import load_prompts, policy_tokenizer
from openrlhf.trainers import distill, kto, preference, reward, sft  # noqa: F401  imported to register tasks
from openrlhf.trainers.tasks import OFFLINE_TASKS
from tests.config.commands import ROOTS
from tests.data import small
from tests.data.small import PLAIN_CHAT, build_tokenizer
from tests.tiny import tiny_config

TEMPLATE = TextFormat(input_template="Q{}=", ending=" <eos>")
CHAT = TextFormat.of(
    SimpleNamespace(apply_chat_template=True), build_tokenizer(PLAIN_CHAT), ending="<|end|>"
)
SPACED = TextFormat(input_template="Q{} ", ending=" <eos>")
UNSPACED = TextFormat(input_template="Q{}=", ending="<eos>")
NONE = TextFormat(ending=" <eos>")
RENDERED = {TEMPLATE: "Qab=", CHAT: "<|user|>ab<|end|>\n<|assistant|>"}

ROWS: dict[str, dict[str, Any]] = {
    "sft": {"input": "ab", "output": "ok"},
    "kd": {"input": "ab", "output": "ok"},
    "kto": {"input": "ab", "output": "ok", "label": 1},
    "dpo": {"prompt": "ab", "chosen": "ok", "rejected": "no"},
    "rm": {"prompt": "ab", "chosen": "ok", "rejected": "no"},
}
LINES = {"kd": "--kd.teacher_model {model}"}
PROMPTS = {
    "train_ppo_ray": "--actor.model_name_or_path {model} --data.prompt_dataset {rows} "
    "--data.label_key label --reward.verifier math --data.max_len 64",
    "eval": "--model.model_name_or_path {model} --eval.dataset {rows} --data.label_key label "
    "--reward.verifier math --data.max_len 64",
    "batch_inference": (
        "--model.model_name_or_path {model} --data.dataset {rows} --output_path {rows}.out"
    ),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    vocabulary = len(build_tokenizer())
    AutoModelForCausalLM.from_config(
        tiny_config("llama", vocab_size=vocabulary, eos_token_id=1)
    ).save_pretrained(folder)
    return folder


def model_trained_with(trained: TextFormat | None, weights: Path) -> str:
    """Save a tokenizer with a recorded text format to `weights`, and return the model's folder."""
    tokenizer = build_tokenizer(PLAIN_CHAT)
    tokenizer.backend_tokenizer.decoder = Fuse()
    record(tokenizer, trained)
    tokenizer.save_pretrained(weights)
    return str(weights)


def write_rows(folder: Path, row: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text((json.dumps(row) + "\n") * 2)
    return file


def first_text(task: str, model: str, rows: Path, flags: str = "", *, follows: bool = True) -> str:
    """Return the first training text of an offline command."""
    line = f"--model.model_name_or_path {model} --data.dataset {rows} {LINES.get(task, '')} {flags}"
    words = line.replace("{model}", model).split()
    config = parse_config(ROOTS[f"train_{task}"], words, command=f"train_{task}")
    made = OFFLINE_TASKS[task](config)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    read, _ = load_rows(made, tokenizer, follows=follows)
    micro = made.collate([read[0], read[1]])
    return str(tokenizer.decode(micro.tokens[: int(micro.offsets[1])]))


def first_prompt(
    command: str, model: str, rows: Path, flags: str = "", *, follows: bool = True
) -> tuple[str, PreTrainedTokenizerBase]:
    """Return the first prompt of a command that generates, and the command's tokenizer."""
    line = f"{PROMPTS[command].format(model=model, rows=rows)} {flags}"
    config = parse_config(ROOTS[command], line.split(), command=command)
    if command == "train_ppo_ray":
        read = load_prompts(config, replace(FirstStart.here(), trained_format=follows))
        return read.train[0].text, read.tokenizer
    if command == "eval":
        candidate = read_candidate(config, "model")
        return candidate.prompts[0].text, candidate.tokenizer
    tokenizer = policy_tokenizer(config, model, flag="--model.model_name_or_path")
    rows_read = load_inference_rows(config)
    prompts = read_inference_rows(config, tokenizer, rows_read, follows=follows)
    return prompts[0].text, tokenizer


@pytest.mark.parametrize("trained", [TEMPLATE, CHAT])
@pytest.mark.parametrize("task", ROWS)
def test_offline_commands_default_to_recorded_format(
    task: str,
    trained: TextFormat,
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = model_trained_with(trained, weights)
    text = first_text(task, model, write_rows(tmp_path, ROWS[task]), "--train.batch_size 2")
    assert text.startswith(f"{RENDERED[trained]}ok")
    notices = [line for line in capsys.readouterr().err.splitlines() if "was trained with" in line]
    assert len(notices) == 1 and trained.flags in notices[0]


@pytest.mark.parametrize("trained", [TEMPLATE, CHAT])
@pytest.mark.parametrize("command", PROMPTS)
def test_generating_commands_default_to_recorded_format(
    command: str,
    trained: TextFormat,
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = model_trained_with(trained, weights)
    rows = write_rows(tmp_path, {"input": "ab", "label": "2"})
    prompt, tokenizer = first_prompt(command, model, rows)
    assert prompt == RENDERED[trained]
    assert capsys.readouterr().err.count("was trained with") == 1
    kept = recorded(tokenizer)
    assert kept and bool(kept.chat_template) == bool(trained.chat_template)
    assert kept.input_template == trained.input_template


@pytest.mark.parametrize(
    "flags", ["--data.input_template {}", "--data.input_template Z{}", "--data.apply_chat_template"]
)
def test_template_flag_overrides_recorded_format(flags: str, weights: Path, tmp_path: Path) -> None:
    model = model_trained_with(TEMPLATE, weights)
    texts = {"{}": "ab", "Z{}": "Zab", "--data.apply_chat_template": RENDERED[CHAT]}
    expected = texts[flags.split()[-1]]
    text = first_text("dpo", model, write_rows(tmp_path, ROWS["dpo"]), flags)
    assert text.startswith(f"{expected}ok")
    prompt, _ = first_prompt(
        "eval", model, write_rows(tmp_path, {"input": "ab", "label": "2"}), flags
    )
    assert prompt == expected


@pytest.mark.parametrize("trained", [None, NONE])
def test_flag_defaults_apply_to_models_without_recorded_template(
    trained: TextFormat | None, weights: Path, tmp_path: Path
) -> None:
    model = model_trained_with(trained, weights)
    assert (
        first_text("sft", model, write_rows(tmp_path, ROWS["sft"]))
        == "User: ab\nAssistant: ok <eos>"
    )
    assert first_text("dpo", model, write_rows(tmp_path, ROWS["dpo"])) == "abok <eos>"


@pytest.mark.parametrize("trained", [TEMPLATE, CHAT])
def test_rows_already_in_recorded_format_are_not_rendered_again(
    trained: TextFormat, weights: Path, tmp_path: Path
) -> None:
    model = model_trained_with(trained, weights)
    whole = RENDERED[trained]
    prompt, tokenizer = first_prompt(
        "train_ppo_ray", model, write_rows(tmp_path, {"input": whole, "label": "2"})
    )
    assert prompt == whole
    kept = recorded(tokenizer)
    assert kept and (kept.input_template, kept.chat_template) == (
        trained.input_template,
        trained.chat_template,
    )
    row = ROWS["dpo"] | {"prompt": whole}
    assert first_text("dpo", model, write_rows(tmp_path, row)).startswith(f"{whole}ok")


@pytest.mark.parametrize("trained", [TEMPLATE, CHAT])
def test_pairs_of_complete_texts_are_not_rendered(
    trained: TextFormat, weights: Path, tmp_path: Path
) -> None:
    model = model_trained_with(trained, weights)
    assert (
        first_text("rm", model, write_rows(tmp_path, {"chosen": "ab ok", "rejected": "ab no"}))
        == "ab ok <eos>"
    )


def test_prompt_drops_trailing_space_that_tokenizer_merges_with_answer(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path, {"input": "a", "label": "2"})
    model = model_trained_with(SPACED, weights)
    assert first_prompt("eval", model, rows)[0] == "Qa "
    monkeypatch.setattr(small, "MERGES", [(" ", "A"), *small.MERGES[1:]])
    model = model_trained_with(SPACED, weights)
    prompt, tokenizer = first_prompt("eval", model, rows)
    kept = recorded(tokenizer)
    assert prompt == "Qa" and kept and kept.input_template == SPACED.input_template


# ---- the space before the eos token


@pytest.mark.parametrize("task", ROWS)
def test_no_space_before_eos_flag_removes_the_space(
    task: str, weights: Path, tmp_path: Path
) -> None:
    model, rows = model_trained_with(None, weights), write_rows(tmp_path, ROWS[task])
    assert first_text(task, model, rows).endswith("ok <eos>")
    assert first_text(task, model, rows, "--data.no_space_before_eos").endswith("ok<eos>")


def test_next_stage_uses_recorded_ending_without_space(weights: Path, tmp_path: Path) -> None:
    model, rows = model_trained_with(UNSPACED, weights), write_rows(tmp_path, ROWS["dpo"])
    assert first_text("dpo", model, rows) == "Qab=ok<eos>"
    assert first_text("dpo", model, rows, "--data.space_before_eos") == "Qab=ok <eos>"
    assert first_text("dpo", model, rows, "--data.input_template Z{}") == "Zabok<eos>"


# ---- runs started by older releases


def test_run_resumed_from_older_release_ignores_recorded_format(
    weights: Path, tmp_path: Path
) -> None:
    assert RunState(step=1).first_start.trained_format is False
    model = model_trained_with(UNSPACED, weights)
    assert (
        first_text("dpo", model, write_rows(tmp_path, ROWS["dpo"]), follows=False) == "abok <eos>"
    )
    rows = write_rows(tmp_path, {"input": "ab", "label": "2"})
    for command in ("train_ppo_ray", "batch_inference"):
        assert first_prompt(command, model, rows, follows=False)[0] == "ab"


def test_journal_records_whether_texts_follow_recorded_format(tmp_path: Path) -> None:
    final = tmp_path / "out.jsonl"
    assert start_of_request(final, "").trained_format is True
    Journal(final, {"first start": "2026-01-01T00:00:00"})
    assert start_of_request(final, "") == FirstStart(
        moment="2026-01-01T00:00:00", trained_format=False
    )
    begun = FirstStart(moment="2026-01-02T00:00:00", trained_format=True)
    Journal(tmp_path / "new.jsonl", begun.entries)
    assert start_of_request(tmp_path / "new.jsonl", "") == begun
