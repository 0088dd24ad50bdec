"""End-to-end tests of batch inference.

The tests cover generation, scoring, training on the output, resuming after a kill, and chat.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.options import parse_config
from openrlhf.data.errors import DataError
from openrlhf.evaluation.batch_inference import run_batch_inference
from tests.e2e.commands import (
    Finished,
    as_arguments,
    finish,
    kill_when,
    launch,
    places,
    run,
    write_rows,
)
from tests.e2e.processes import descendants, survivors
from tests.tiny import HEADS, character_tokenizer, save_reward_model, save_tiny_model

PROMPTS, SAMPLES = 8, 3


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create a language model, a reward model, and prompts."""
    save_tiny_model(own_folder / "model", seed=0, **HEADS)
    torch.manual_seed(2)
    save_reward_model(own_folder / "reward", own_folder / "model")
    draw = random.Random(0)
    write_rows(
        own_folder / "prompts.jsonl",
        [{"input": f"{draw.randint(0, 9999)}="} for _ in range(PROMPTS)],
    )
    return own_folder


def flags(workspace: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "prompts.jsonl",
        "data.max_len": 24,
        "rollout.max_new_tokens": 8,
        "best_of_n": SAMPLES,
        "ds.param_dtype": "fp32",
        "output_path": workspace / f"{name}.jsonl",
        "run.dir": workspace / f"run_{name}",
        **changes,
    }


def scoring(workspace: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "task": "rm",
        "reward.model_name_or_path": workspace / "reward",
        "data.dataset": workspace / "answers.jsonl",
        "data.max_len": 32,
        "ds.param_dtype": "fp32",
        "output_path": workspace / f"{name}.jsonl",
        "run.dir": workspace / f"run_{name}",
        **changes,
    }


def infer(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the command in this process, and return the lines that the command writes."""
    run_batch_inference(
        parse_config(BatchInferenceConfig, as_arguments(line), command="batch_inference")
    )
    return lines(line["output_path"])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start one Ray cluster for all commands in this process."""
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def answers(workspace: Path, cluster: None) -> list[dict[str, Any]]:
    """Return a single engine's answers to all prompts."""
    return infer(flags(workspace, "answers"))


@pytest.fixture(scope="module")
def scores(workspace: Path, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers together with their rewards."""
    return infer(scoring(workspace, "scores"))


def test_answers_are_written_in_dataset_order(
    workspace: Path, answers: list[dict[str, Any]]
) -> None:
    asked = [row["input"] for row in lines(workspace / "prompts.jsonl")]
    assert [row["input"] for row in answers] == [text for text in asked for _ in range(SAMPLES)]
    assert all(list(row) == ["input", "output"] for row in answers)
    assert len({row["output"] for row in answers}) > PROMPTS
    assert not (workspace / "answers.jsonl.part").exists()


def test_journal_with_different_settings_is_rejected_and_a_truncated_journal_is_continued(
    workspace: Path, scores: list[dict[str, Any]]
) -> None:
    """A killed command may leave behind a journal that ends in the middle of a line."""
    line = scoring(workspace, "scores")
    with pytest.raises(DataError, match="--output_path"):
        infer(line)
    identity = {"task": "rm"}
    path = workspace / "scores.jsonl.part"
    path.write_text(json.dumps({"--task": "generate"}) + "\n")
    with pytest.raises(DataError, match="--task: was generate, now rm"):
        infer(line)
    path.write_text(json.dumps(identity) + "\n" + f"[0, [{scores[0]['reward']}]]\n[1, [0.")
    assert infer(line) == scores


def test_rewards_match_plain_transformers(
    workspace: Path, answers: list[dict[str, Any]], scores: list[dict[str, Any]]
) -> None:
    hf = AutoModelForSequenceClassification.from_pretrained(workspace / "reward").float().eval()
    tokenizer = character_tokenizer()
    with torch.no_grad():
        for row, answer in zip(scores, answers, strict=True):
            text = answer["input"] + answer["output"].rstrip("\n")
            text = text if text.endswith("<eos>") else f"{text} <eos>"
            expected = float(hf(torch.tensor([tokenizer(text)["input_ids"]])).logits)
            assert row["reward"] == pytest.approx(expected, abs=1e-5)
            assert {name: row[name] for name in answer} == answer


def chain(workspace: Path, name: str, processor: str, command: str, **columns: str) -> Finished:
    """Score with a post-processor, then train on its rows.

    The tokenizer has no tokens for < and _.
    """
    template = "{input} score:{reward} " if processor == "csft" else None
    infer(scoring(workspace, name, post_processor=processor, reward_template=template))
    training = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / f"{name}.jsonl",
        "data.max_len": 64,
        "train.batch_size": 4,
        "train.max_epochs": 1,
        "ds.param_dtype": "fp32",
        **{key.replace("__", "."): value for key, value in columns.items()},
        **places(workspace / f"trained_{name}"),
    }
    return run(command, training)


def test_rejection_sampling_output_can_be_used_for_fine_tuning(
    workspace: Path, answers: list[dict[str, Any]]
) -> None:
    chain(workspace, "rs", "rs", "train_sft", data__output_key="output", data__input_template="{}")
    assert len(lines(workspace / "rs.jsonl")) == PROMPTS
    assert (workspace / "trained_rs/model/config.json").is_file()


@pytest.mark.verify
def test_pairs_can_be_used_for_dpo_and_conditioned_inputs_for_fine_tuning(
    workspace: Path, answers: list[dict[str, Any]]
) -> None:
    chain(workspace, "pairs", "iter_dpo", "train_dpo", data__prompt_key="prompt")
    chain(
        workspace, "csft", "csft", "train_sft", data__output_key="output", data__input_template="{}"
    )
    tuned = workspace / "trained_csft/model"
    prompt = {"csft.enable": True, "csft.prompt": "score:5.00", "data.max_len": 40}
    asked = infer(flags(workspace, "asked", **{"model.model_name_or_path": tuned, **prompt}))
    assert all(row["input"].endswith("= score:5.00 ") for row in asked)


@pytest.mark.verify
def test_each_iteration_processes_its_own_rows(workspace: Path, cluster: None) -> None:
    rows = infer(flags(workspace, "iter", iter=1, best_of_n=1, **{"rollout.batch_size": 5}))
    asked = [row["input"] for row in lines(workspace / "prompts.jsonl")]
    assert [row["input"] for row in rows] == asked[5:]


@pytest.mark.verify
def test_killed_command_resumes_without_losing_or_duplicating_rows(workspace: Path) -> None:
    """Each row has its own seed, so the two parts together equal the output without a kill."""
    draw = random.Random(1)
    many = write_rows(
        workspace / "many.jsonl", [{"input": f"{draw.randint(0, 9999)}="} for _ in range(300)]
    )
    common = {
        "data.dataset": many,
        "rollout.batch_size": 4,
        "vllm.engine_args": '{"max_num_seqs":4}',
    }
    run("batch_inference", flags(workspace, "whole", **common))
    line, journal = flags(workspace, "killed", **common), workspace / "killed.jsonl.part"
    killed = launch("batch_inference", line)
    kill_when(killed, lambda: journal.exists() and journal.read_bytes().count(b"\n") > 20)
    done = journal.read_bytes().count(b"\n") - 1
    assert 20 <= done < 300
    assert not (workspace / "killed.jsonl").exists()
    finished = run("batch_inference", line)
    assert f"300 rows, {300 - done} without a result" in finished.printed
    assert lines(workspace / "killed.jsonl") == lines(workspace / "whole.jsonl")


def test_chat_through_a_pipe_answers_until_end_of_input(workspace: Path) -> None:
    """Ctrl-C stops the current answer but not the program.

    A terminal sends SIGINT to the whole process group.
    """
    line = {
        "model.model_name_or_path": workspace / "model",
        "data.max_len": 256,
        "rollout.max_new_tokens": 128,
    }
    line["ds.param_dtype"] = "fp32"
    chat = talking(line)
    assert chat.stdin and chat.stdout
    assert "the template 'User: {}\\nAssistant: '" in chat.stdout.readline()
    family = descendants(chat.pid)
    chat.stdin.write("1+1=\nxy\n/reset\nab\n")
    chat.stdin.flush()
    chat.stdin.close()
    chat.stdin = None
    done = finish(chat)
    assert done.status == 0, done.errors
    assert "/reset" in done.printed
    assert survivors(family, within=60) == []


def talking(line: dict[str, Any]) -> Any:
    """Start a chat that reads its input from a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "openrlhf.cli.interactive_chat", *as_arguments(line)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.verify
def test_ctrl_c_stops_the_answer_but_not_the_chat_session(workspace: Path) -> None:
    changes: dict[str, Any] = {
        "rollout.max_new_tokens": 400,
        "data.max_len": 500,
        "rollout.stop_token_ids": None,
        "rollout.repetition_penalty": 0.01,  # repeats the prompt and never ends the answer
    }
    chat = talking(
        {"model.model_name_or_path": workspace / "model", "ds.param_dtype": "fp32", **changes}
    )
    assert chat.stdin and chat.stdout
    while "/reset" not in chat.stdout.readline():
        pass
    chat.stdin.write("1+1=\n")
    chat.stdin.flush()
    assert chat.stdout.read(1)  # the first character of the answer
    os.killpg(chat.pid, signal.SIGINT)
    chat.stdin.write("1+1=\n/exit\n")
    chat.stdin.flush()
    done = finish(chat)
    assert done.status == 0, done.errors
    assert "[stopped]" in done.printed
    assert "Traceback" not in done.errors
