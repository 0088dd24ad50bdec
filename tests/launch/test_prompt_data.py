"""Prompts that an RL run reads before models are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.checks import CheckError
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.first_start import FirstStart
from openrlhf.launch.prompt_data import load_pretraining_text, load_prompts
from openrlhf.launch.reinforcement import show_prompts
from tests.e2e.commands import as_arguments
from tests.tiny import character_tokenizer, save_tiny_model


def test_max_samples_does_not_limit_evaluation_prompts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": f"{n}+1="}) + "\n" for n in range(9)))
    flags = {
        "actor.model_name_or_path": save_tiny_model(tmp_path / "model"),
        "data.prompt_dataset": str(rows),
        "data.max_samples": 4,
        "data.max_len": 32,
        "reward.remote_url": "http://localhost:1/get_reward",
        "eval.dataset": str(rows),
        "ckpt.path": str(tmp_path / "ckpt"),
    }
    read = load_prompts(
        parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray"), FirstStart.here()
    )
    assert read.eval is not None
    assert (len(read.train), len(read.eval)) == (4, 9)


def test_numeric_pretraining_text_in_csv_file_stays_text(tmp_path: Path) -> None:
    (tmp_path / "text.csv").write_text("input\n0123\n45\n")
    flags = {
        "actor.model_name_or_path": save_tiny_model(tmp_path / "model"),
        "data.prompt_dataset": "owner/prompts",
        "reward.remote_url": "http://localhost:1/get_reward",
        "algo.ptx.dataset": str(tmp_path / "text.csv"),
    }
    tokenizer = character_tokenizer()
    config = parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray")
    rows = load_pretraining_text(config, tokenizer).rows
    assert [tokenizer.decode(rows[n].tokens, skip_special_tokens=True) for n in (0, 1)] == [
        "0123",
        "45",
    ]


def config_with_prompts(tmp_path: Path, lengths: list[int], **flags: object) -> PPOConfig:
    """Return the configuration of a run whose prompts have these lengths in tokens."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"input": "1" * length, "label": "2"}) + "\n" for length in lengths)
    )
    smallest = {
        "actor.model_name_or_path": save_tiny_model(tmp_path / "model"),
        "data.prompt_dataset": str(rows),
        "data.label_key": "label",
        "data.max_len": 32,
        "reward.verifier": "math",
        "ckpt.path": str(tmp_path / "ckpt"),
    }
    return parse_config(PPOConfig, as_arguments({**smallest, **flags}), command="train_ppo_ray")


def test_notice_counts_truncated_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with_prompts(tmp_path, [4] * 20 + [30] * 3, **{"rollout.max_new_tokens": 8})
    data = load_prompts(config, FirstStart.here())
    assert "3 of 23 prompts" in capsys.readouterr().err
    show_prompts(config, data.train, [22])
    assert "24 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("section", ["data.prompt_dataset", "eval.dataset"])
def test_prompt_that_leaves_no_room_for_an_answer_is_rejected(tmp_path: Path, section: str) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"input": "1" * 31, "label": "2"}) + "\n")
    config = config_with_prompts(tmp_path, [4] * 20, **{section: str(long)})
    with pytest.raises(
        CheckError, match=r"1 of 1 prompts.*--data\.max_len 32.*--rollout\.max_new_tokens"
    ):
        load_prompts(config, FirstStart.here())


def test_problems_of_all_datasets_are_reported_together(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"question": "1", "label": "2"}) + "\n")
    flags = {"eval.dataset": str(held_out), "data.input_key": "input"}
    config = config_with_prompts(tmp_path, [4, 31, 0], **flags)
    with pytest.raises(CheckError) as caught:
        load_prompts(config, FirstStart.here())
    assert "rows.jsonl, row 3, column 'input': is an empty prompt" in str(caught.value)
    assert "held_out.jsonl has no column 'input'" in str(caught.value)


def test_missing_labels_error_names_first_row(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "labels.jsonl"
    rows.write_text(
        "".join(json.dumps({"input": "1", "label": label}) + "\n" for label in ["2", "", ""])
    )
    with pytest.raises(CheckError, match=r"2 of 3 labels.*labels\.jsonl, row 2, column 'label'"):
        load_prompts(
            config_with_prompts(tmp_path, [4], **{"data.prompt_dataset": str(rows)}),
            FirstStart.here(),
        )


def test_labels_in_detected_column_are_checked(tmp_path: Path) -> None:
    rows = tmp_path / "recognized.jsonl"
    row = {"instruction": "1", "input": "", "output": ""}
    rows.write_text(json.dumps(row) + "\n")
    config = config_with_prompts(tmp_path, [4], **{"data.prompt_dataset": str(rows)})
    without_key = dict(config.given)
    without_key.pop("data.label_key")
    config = parse_config(PPOConfig, as_arguments(without_key), command="train_ppo_ray")
    with pytest.raises(
        CheckError, match=r"1 of 1 labels.*recognized\.jsonl, row 1, column 'output'"
    ):
        load_prompts(config, FirstStart.here())
