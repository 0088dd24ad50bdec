"""An agent that uses only the stock `openai` client learns to use its tool."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from examples.agents.calculator_task import make_task
from tests.e2e.commands import column, run
from tests.ranks import ROOT
from tests.verify.results import write_result

pytestmark = pytest.mark.verify
AGENT = ROOT / "examples/agents/calculator.py"
ROWS: list[list[str]] = []
COLUMNS = [
    "seed",
    "held-out pass@1 before",
    "after",
    "calls per episode before",
    "after",
    "largest gap",
    "seconds",
]


@pytest.mark.parametrize("seed", [1, 2, 3], ids="seed{}".format)
def test_rewards_teach_an_agent_to_use_its_tool_more_often(tmp_path: Path, seed: int) -> None:
    make_task(tmp_path, seed=seed)
    places = {
        "run.dir": tmp_path / "sft",
        "ckpt.output_dir": tmp_path / "policy",
        "ckpt.path": tmp_path / "sft/ckpt",
    }
    sft = {
        "model.model_name_or_path": tmp_path / "model",
        "data.dataset": tmp_path / "transcripts.jsonl",
        "data.input_key": "messages",
        "data.apply_chat_template": True,
        "data.multiturn": True,
        "data.max_len": 64,
        "train.batch_size": 64,
        "train.micro_batch_size": 64,
        "train.max_epochs": 2,
        "adam.lr": 3e-3,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "train.seed": seed,
    }
    run("train_sft", {**sft, **places})
    out, start = tmp_path / "rl", time.monotonic()
    run(
        "train_ppo_ray",
        {
            "actor.model_name_or_path": tmp_path / "policy",
            "train.agent_func_path": AGENT,
            "data.prompt_dataset": tmp_path / "prompts.jsonl",
            "data.label_key": "answer",
            "data.max_samples": 640,
            "data.max_len": 64,
            "rollout.max_new_tokens": 16,
            "rollout.batch_size": 32,
            "rollout.n_samples_per_prompt": 8,
            "rollout.micro_batch_size": 128,
            "train.batch_size": 256,
            "train.micro_batch_size": 128,
            "train.colocate_actor_ref": True,
            "algo.advantage.estimator": "group_norm",
            "algo.kl.init_coef": 1e-3,
            "algo.kl.use_loss": True,
            "algo.kl.estimator": "k3",
            "actor.adam.lr": 3e-4,
            "ds.param_dtype": "fp32",
            "ds.packing_samples": True,
            "eval.dataset": tmp_path / "held_out.jsonl",
            "eval.steps": 20,
            "eval.at_start": True,
            "eval.temperature": 1.0,
            "train.seed": seed,
            "run.dir": out,
            "ckpt.output_dir": out / "model",
            "ckpt.path": out / "checkpoints",
        },
    )
    before, *_, after = column(out, "eval/eval_sums_pass1")
    calls, gap = column(out, "train/tool_calls"), max(column(out, "train/logprob_gap_max"))
    numbers = [before, after, sum(calls[:3]) / 3, sum(calls[-3:]) / 3]
    ROWS.append(
        [str(seed), *(f"{x:.3f}" for x in numbers), f"{gap:.1e}", f"{time.monotonic() - start:.0f}"]
    )
    note = (
        "The task is to add two numbers. In the supervised transcripts, half of the answers use "
        "the calculator and half are guesses."
    )
    write_result(
        "agents",
        "An agent with a tool",
        "pytest -m verify tests/verify/test_agents.py",
        COLUMNS,
        ROWS,
        note,
    )
    assert after - before >= 0.2
    assert calls[-1] > calls[0]
    assert gap < 1e-3
