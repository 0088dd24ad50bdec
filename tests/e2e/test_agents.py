"""End-to-end tests of agents: a multi-turn environment on Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.agents.calculator_task import make_task
from openrlhf.observability.run_folder import read_lines
from tests.e2e.commands import Flags, column, numbers, places, run, samples, write_rows
from tests.openai_server import openai_server
from tests.ranks import ROOT
from tests.tiny import HEADS, character_tokenizer, save_tiny_model

EXAMPLES, AGENTS = ROOT / "examples/agents", ROOT / "tests/agents/agent_files"


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    save_tiny_model(own_folder / "model", max_position_embeddings=1024, **HEADS)
    write_rows(
        own_folder / "prompts.jsonl",
        [{"input": "guess a digit: ", "answer": str(i % 10)} for i in range(12)],
    )
    return own_folder


def agent_flags(workspace: Path, folder: Path, agent: Path, **changes: Any) -> dict[str, Any]:
    """Return flags for three steps of four prompts with four episodes each."""
    return {
        "actor.model_name_or_path": workspace / "model",
        "data.prompt_dataset": workspace / "prompts.jsonl",
        "data.label_key": "answer",
        "data.max_len": 96,
        "train.agent_func_path": agent,
        "rollout.max_new_tokens": 6,
        "rollout.max_turns": 4,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 8,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "train.colocate_actor_ref": True,
        "ds.param_dtype": "fp32",
        "actor.adam.lr": 1e-2,
        "actor.lr_warmup_ratio": 0.0,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.01,
        **places(folder),
        **changes,
    }


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Return a folder for temporary files whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def game(workspace: Path, temporary: Path) -> Path:
    flags = agent_flags(
        workspace, workspace / "game", EXAMPLES / "higher_lower.py", **{"reward.workers": 2}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "RAY_TMPDIR"):
            patch.setenv(name, str(temporary))
        run("train_ppo_ray", flags)
    return workspace / "game"


def test_example_environment_trains(game: Path) -> None:
    assert len(numbers(game)) == 3
    assert column(game, "train/failed_episodes") == [0, 0, 0]
    assert all(1 <= guesses <= 4 for guesses in column(game, "train/guesses"))
    assert all("higher: " in row["response"] or row["reward"] is not None for row in samples(game))
    assert any(
        " higher: " in row["response"] or " lower: " in row["response"] for row in samples(game)
    )


def test_run_leaves_no_temporary_files(game: Path, temporary: Path) -> None:
    assert {path.name for path in temporary.iterdir()} <= {"ray"}
    assert [path.name for path in (temporary / "ray").glob("session_2*")] == []


def test_trainer_reproduces_the_logprobs_recorded_over_several_turns(
    game: Path,
) -> None:
    assert max(column(game, "train/logprob_gap_max")) < 1e-3
    assert column(game, "train/rollout_ratio_outside") == [0, 0, 0]


@pytest.mark.verify
def test_episodes_depend_on_the_seed_but_not_on_the_number_of_processes(
    workspace: Path, game: Path
) -> None:
    flags: Flags = {
        "config": game / "config.yaml",
        "run.dir": workspace / "again",
        "reward.workers": 1,
    }
    places = {
        "ckpt.output_dir": workspace / "again/model",
        "ckpt.path": workspace / "again/checkpoints",
    }
    run("train_ppo_ray", {**flags, **places})
    assert numbers(workspace / "again") == numbers(game)


def test_agent_that_uses_only_the_openai_client_trains(workspace: Path) -> None:
    """The untrained policy calls no tools; `make verify` tests learning to call tools."""
    task = workspace / "sums"
    task.mkdir()
    make_task(task, transcripts=1, prompts=12)
    flags = agent_flags(
        task, workspace / "chat", EXAMPLES / "calculator.py", **{"rollout.max_turns": None}
    )
    run("train_ppo_ray", {**flags, "reward.workers": 2})
    assert column(workspace / "chat", "train/failed_episodes") == [0, 0, 0]
    assert max(column(workspace / "chat", "train/logprob_gap_max")) < 1e-3
    assert column(workspace / "chat", "train/tool_calls") == [0, 0, 0]


@pytest.mark.verify
def test_episodes_that_a_served_judge_or_teacher_cannot_score_are_dropped(
    workspace: Path, tmp_path: Path
) -> None:
    prompts = [
        {"input": "be good: ", "answer": "broken" if i % 4 == 0 else "loud"} for i in range(8)
    ]
    changes: dict[str, Any] = {
        "data.prompt_dataset": write_rows(tmp_path / "prompts.jsonl", prompts),
        "algo.distill.teacher": "wise",
        "reward.on_error": "drop",
        "reward.retries": 0,
    }
    with openai_server() as server:
        server.texts = lambda token: character_tokenizer().decode([token])
        changes["rollout.remote_engines"] = [f"helper={server.url}", f"wise={server.url}"]
        run(
            "train_ppo_ray", agent_flags(workspace, tmp_path / "run", AGENTS / "asks.py", **changes)
        )
    rows = samples(tmp_path / "run")
    assert (
        sorted((row["reward"] or 0, row["failure"] or "") for row in rows)
        == [(0, "server")] * 8 + [(1, "")] * 24
    )
    assert all(math.isfinite(gap) and gap for gap in column(tmp_path / "run", "train/teacher_kl"))
    assert all(
        row["timing/teacher_logprobs"] > 0 for row in read_lines(tmp_path / "run/metrics.jsonl")
    )


def test_agent_that_cannot_be_loaded_is_rejected_before_startup(
    workspace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text("class Agent: ...\n")
    done = run("train_ppo_ray", agent_flags(workspace, tmp_path / "run", file), status=2)
    assert "defines no class AgentExecutor" in done.errors
    assert "Traceback" not in done.errors


@pytest.mark.verify
def test_agent_that_opens_new_conversations_trains_with_one_reward_per_episode(
    own_folder: Path,
) -> None:
    workspace = own_folder / "summaries"
    workspace.mkdir()
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    save_tiny_model(
        workspace / "model", max_position_embeddings=1024, chat_template=template, **HEADS
    )
    write_rows(workspace / "prompts.jsonl", [{"input": f"{i}", "answer": "1"} for i in range(12)])
    flags = agent_flags(
        workspace, workspace / "run", AGENTS / "summarises.py", **{"rollout.max_turns": None}
    )
    run("train_ppo_ray", {name: value for name, value in flags.items() if value is not None})
    folder = workspace / "run"
    assert len(numbers(folder)) == 3
    assert column(folder, "rollout/num_samples") == [16, 16, 16]
    assert column(folder, "rollout/conversations_mean") == [2, 2, 2]
    assert column(folder, "rollout/turns_mean") == [3, 3, 3]
    assert column(folder, "train/failed_episodes") == [0, 0, 0]
    assert all(gap < 1e-3 for gap in column(folder, "train/logprob_gap_max"))
    assert all(row["conversations"] == 2 and row["turns"] == 3 for row in samples(folder))
