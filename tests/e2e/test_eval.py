"""End-to-end tests of `openrlhf eval`: pass@k, reward model accuracy, and a judge's win rate."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.options import parse_config
from openrlhf.evaluation.runs import run_evaluation
from openrlhf.rewards.budget import RewardErrors
from tests.e2e.commands import Finished, as_arguments, evaluated, numbers, run, write_rows
from tests.judge_server import judge_server
from tests.tiny import HEADS, character_tokenizer, save_tiny_model, tiny_config

REWARDS = Path(__file__).parent / "reward_files"
PROMPTS, SAMPLES = 7, 3


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create two language models, a reward model, and rows that are both prompts and pairs."""
    save_tiny_model(own_folder / "model", seed=0, **HEADS)
    save_tiny_model(own_folder / "other", seed=1, **HEADS)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(
        tiny_config("qwen2-tied", num_labels=1, **HEADS)
    ).float().save_pretrained(own_folder / "reward")
    character_tokenizer().save_pretrained(own_folder / "reward")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(3 * PROMPTS)]
    rows = [
        {
            "input": f"{a}=",
            "chosen": b,
            "rejected": c,
            "datasource": "odd" if number % 2 else "even",
        }
        for number, (a, b, c) in enumerate(zip(words[::3], words[1::3], words[2::3], strict=True))
    ]
    write_rows(own_folder / "rows.jsonl", rows)
    return own_folder


def flags(workspace: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "eval.dataset": workspace / "rows.jsonl",
        "data.max_len": 16,
        "ds.param_dtype": "fp32",
        "run.dir": workspace / name,
        **changes,
    }


def answering(workspace: Path, name: str, **changes: Any) -> dict[str, Any]:
    sampling = {
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": 4,
        "eval.n_samples_per_prompt": SAMPLES,
    }
    return flags(
        workspace, name, **{"model.model_name_or_path": workspace / "model", **sampling, **changes}
    )


# ---- an evaluation in a separate process


@pytest.fixture(scope="module")
def pass_k(workspace: Path) -> Finished:
    """Evaluate samples with a function and a reward model. The command starts Ray itself."""
    rewards = {
        "reward.remote_url": REWARDS / "letters.py",
        "reward.model_name_or_path": workspace / "reward",
    }
    return run("main eval", answering(workspace, "pass_k", **rewards, **{"eval.temperature": 1.0}))


def test_every_sample_of_every_prompt_is_written(pass_k: Finished, workspace: Path) -> None:
    rows = evaluated(workspace / "pass_k")
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [
        (prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)
    ]
    assert (workspace / "pass_k/report.html").is_file()
    assert "task: pass_k" in (workspace / "pass_k/config_resolved.yaml").read_text()


def test_pass_at_k_is_computed_from_the_samples_of_each_data_source(
    pass_k: Finished, workspace: Path
) -> None:
    """The function's score decides which samples pass.

    The reward is the sum of the function's reward and the reward model's reward.
    """
    [metrics] = numbers(workspace / "pass_k")
    rows = evaluated(workspace / "pass_k")
    for source, first in (("even", 0), ("odd", 1)):
        groups = [
            [row for row in rows if row["prompt_index"] == n] for n in range(first, PROMPTS, 2)
        ]
        scores = [[row["scores"]["score"] for row in group] for group in groups]
        assert metrics[f"eval/eval_{source}_pass1"] == pytest.approx(fmean(map(fmean, scores)))
        assert metrics[f"eval/eval_{source}_pass{SAMPLES}"] == pytest.approx(
            fmean(map(max, scores))
        )
        mean = fmean(row["reward"] for group in groups for row in group)
        assert metrics[f"eval/eval_{source}_reward_mean"] == pytest.approx(mean)
    assert all(
        row["reward"]
        == pytest.approx(row["scores"]["reward_rule"] + row["scores"]["reward_model_1"])
        for row in rows
    )
    assert metrics["eval/eval_num_samples"] == PROMPTS * SAMPLES
    assert metrics["eval/eval_failed_episodes"] == 0


def test_table_has_one_row_per_data_source_and_a_total(pass_k: Finished) -> None:
    table = [line.split() for line in pass_k.printed.splitlines()]
    assert [
        "data",
        "source",
        "prompts",
        "pass@1",
        "pass@3",
        "reward",
        "tokens",
        "truncated",
        "failed",
    ] in table
    assert [
        (row[0], row[1], row[-1])
        for row in table
        if len(row) == 8 and row[0] in ("even", "odd", "all")
    ] == [
        ("even", "4", "0"),
        ("odd", "3", "0"),
        ("all", "7", "0"),
    ]


# ---- evaluations in this process, on a shared Ray cluster


@pytest.fixture(scope="module")
def cluster(pass_k: Finished) -> Iterator[None]:
    """Start Ray after `pass_k` is complete, because `pass_k` must not find Ray running."""
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
    )
    yield
    ray.shutdown()


def evaluate(line: dict[str, Any]) -> None:
    run_evaluation(parse_config(EvaluationConfig, as_arguments(line), command="eval"))


@pytest.mark.usefixtures("cluster")
def test_reward_model_accuracy_matches_plain_transformers(workspace: Path) -> None:
    evaluate(
        flags(
            workspace,
            "accuracy",
            task="rm_accuracy",
            **{"reward.model_name_or_path": workspace / "reward"},
        )
    )
    hf, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(workspace / "reward").eval(),
        character_tokenizer(),
    )
    rows = evaluated(workspace / "accuracy")
    margins = []
    with torch.no_grad():
        for row in rows:
            texts = [
                torch.tensor([tokenizer(row[side])["input_ids"]])
                for side in ("response", "against")
            ]
            ours, theirs = (float(hf(tokens).logits) for tokens in texts)
            assert (row["reward"], row["against_reward"]) == pytest.approx((ours, theirs), abs=1e-5)
            margins.append(ours - theirs)
    [metrics] = numbers(workspace / "accuracy")
    assert len(rows) == PROMPTS
    assert metrics["eval/acc_mean"] == fmean(margin > 0 for margin in margins)
    assert metrics["eval/margin_mean"] == pytest.approx(fmean(margins), abs=1e-5)
    assert metrics["eval/eval_odd_acc_mean"] == fmean(margin > 0 for margin in margins[1::2])


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_judge_computes_the_win_rate_against_another_model(workspace: Path) -> None:
    """The judge prefers digits, and always says B for two equal answers, which counts as a tie."""
    against = {
        "task": "win_rate",
        "against.model_name_or_path": workspace / "other",
        "eval.temperature": 1.0,
    }
    with judge_server() as judge:
        evaluate(
            answering(
                workspace, "judged", **against, **{"judge.url": judge.url, "judge.model": "digits"}
            )
        )
    rows = evaluated(workspace / "judged")
    digits = [
        [sum(map(str.isdigit, row[side])) for side in ("response", "against")] for row in rows
    ]
    more = [ours - theirs for ours, theirs in digits]
    assert [row["win"] for row in rows] == [1.0 if n > 0 else 0.0 if n < 0 else 0.5 for n in more]
    assert {row["win"] for row in rows} == {0.0, 0.5, 1.0}
    assert len(judge.bodies) == 2 * PROMPTS * SAMPLES
    assert not any("<eos>" in body["messages"][0]["content"] for body in judge.bodies)
    [metrics] = numbers(workspace / "judged")
    assert metrics["eval/win_rate"] == pytest.approx(fmean(row["win"] for row in rows))


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_command_fails_after_writing_all_rows_if_the_judge_mostly_fails(
    workspace: Path,
) -> None:
    """The opposing model's answers come from a dataset column."""
    column = {"task": "win_rate", "against.answer_key": "chosen"}
    with (
        judge_server() as judge,
        pytest.raises(RewardErrors, match="21 of 21 pairs could not be judged"),
    ):
        evaluate(
            answering(
                workspace,
                "failing",
                **column,
                **{"judge.url": judge.url, "judge.model": "undecided"},
            )
        )
    rows = evaluated(workspace / "failing")
    written = [
        json.loads(line)["chosen"] for line in (workspace / "rows.jsonl").read_text().splitlines()
    ]
    assert [row["against"] for row in rows] == [
        f"{answer}<eos>" for answer in written for _ in range(SAMPLES)
    ]
    assert {row["failure"] for row in rows} == {"result"}
    assert numbers(workspace / "failing")[0]["eval/failed_pairs"] == PROMPTS * SAMPLES
