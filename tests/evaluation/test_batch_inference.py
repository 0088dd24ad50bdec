"""Post-processors against loops written from their definitions, the journal under kills, and failed answers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from openrlhf.data.errors import DataError
from openrlhf.evaluation.batch_inference import keep
from openrlhf.evaluation.journal import Journal
from openrlhf.evaluation.post_processing import POST_PROCESSORS
from openrlhf.observability.display import Display
from openrlhf.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder
from tests.config.commands import parse

ROWS = [
    {"input": question, "output": f"{question}{number}", "reward": reward}
    for number, (question, reward) in enumerate(
        [("a", 0.5), ("b", -1.0), ("a", 2.25), ("c", 1.0), ("a", -0.125), ("b", 3.0), ("c", 1.0), ("a", 2.25)]
    )
]


def processed(name: str, line: str = "", rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    return POST_PROCESSORS[name](rows, parse("batch_inference", f"--task rm --post_processor {name} {line}"))


def test_rejection_sampling_keeps_the_first_of_the_best_of_each_input() -> None:
    best: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        if row["input"] not in best or row["reward"] > best[row["input"]]["reward"]:
            best[row["input"]] = row
    assert processed("rs") == list(best.values())
    assert [row["output"] for row in processed("rs")] == ["a2", "b5", "c3"]


def test_pairs_are_the_ends_of_each_input_and_equal_rewards_make_none() -> None:
    rewards: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in ROWS:
        rewards[row["input"]].append((row["reward"], row["output"]))
    rows = processed("iter_dpo")
    assert [row["prompt"] for row in rows] == ["a", "b"]
    for row in rows:
        group = rewards[row["prompt"]]
        assert row["chosen_reward"] == max(group)[0] and row["rejected_reward"] == min(group)[0]
        assert (row["chosen_reward"], row["chosen"]) in group and (row["rejected_reward"], row["rejected"]) in group
    assert list(rows[0]) == ["prompt", "chosen", "chosen_reward", "rejected", "rejected_reward"]


def test_a_conditioned_input_says_the_reward_with_two_decimals() -> None:
    rows = processed("csft")
    assert [row["input"] for row in rows[:3]] == ["a <rm_score>: 0.50 ", "b <rm_score>: -1.00 ", "a <rm_score>: 2.25 "]
    assert [(row["output"], row["reward"]) for row in rows] == [(row["output"], row["reward"]) for row in ROWS]


def test_normalised_rewards_are_those_of_all_rows_with_the_unbiased_deviation() -> None:
    mean = sum(row["reward"] for row in ROWS) / len(ROWS)
    deviation = math.sqrt(sum((row["reward"] - mean) ** 2 for row in ROWS) / (len(ROWS) - 1))
    rows = processed("csft", "--reward.normalize_enable --reward_template {reward}|{input}")
    assert [row["input"] for row in rows] == [
        f"{(row['reward'] - mean) / deviation:.2f}|{row['input']}" for row in ROWS
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_equal_rewards_are_normalised_to_zero(count: int) -> None:
    rows = [{"input": "{reward}", "output": "x", "reward": 0.1}] * count
    assert [row["input"] for row in processed("csft", "--reward.normalize_enable", rows)] == [
        "{reward} <rm_score>: 0.00 "
    ] * count


# ---- the journal


def results(path: Path, identity: dict[str, Any] | None = None) -> dict[int, Any]:
    journal = Journal(path, identity or {"--best_of_n": 2})
    return journal.results


def test_a_journal_cut_at_any_byte_has_whole_rows_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path, {"--best_of_n": 2})
    rows = {5: ["a\nb", "é"], 1: ["", "x"], 3: [0.25]}
    for row, result in rows.items():
        journal.add(row, result)
    whole = journal.path.read_bytes()
    for length in range(len(whole) + 1):
        journal.path.write_bytes(whole[:length])
        kept = results(path)
        complete = max(0, whole[:length].count(b"\n") - 1)
        assert kept == dict(list(rows.items())[:complete])
        again = Journal(path, {"--best_of_n": 2})
        for row in rows.keys() - kept.keys():
            again.add(row, rows[row])
        assert results(path) == rows


def test_results_of_other_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results(path)
    with pytest.raises(DataError, match="begun with other settings") as refused:
        results(path, {"--best_of_n": 3})
    assert "--best_of_n: 2 there, 3 here" in str(refused.value)
    assert results(path) == {}


def test_a_finished_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = Journal(path, {})
    first.path.unlink()
    path.write_text("{}\n")
    with pytest.raises(DataError, match="is there already: delete it, or give another path"):
        Journal(path, {})


# ---- failed answers


class Shown:
    """A recorder that only shows."""

    def __init__(self) -> None:
        self.display = Display(quiet=True)


def answers(row: int, *texts: str, error: str | None = None) -> list[Trajectory]:
    group: list[Trajectory] = []
    for number, text in enumerate(texts):
        builder = TrajectoryBuilder([1, 2])
        builder.append_action([3], [-1.0])
        prompt = Prompt(index=row, text="q", tokens=[1, 2])
        done = builder.finish(prompt=prompt, sample_index=number, stop_reason=StopReason.STOP, response_text=text)
        group.append(done.failing(error, Failure.ENGINE) if error and number else done)
    return group


def test_a_row_with_a_failed_answer_is_reported_and_left_for_the_next_command(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl", {})
    recorder: Any = Shown()
    failed = keep(
        [answers(0, "x", "y"), answers(2, "x", "y", error="no engine"), answers(1, "", "z")], journal, recorder, every=2
    )
    assert [(t.prompt.index, t.error) for t in failed] == [(2, "no engine")]
    assert results(tmp_path / "out.jsonl", {}) == {0: ["x", "y"], 1: ["", "z"]}
    assert all(json.loads(line) is not None for line in journal.path.read_text().splitlines())
