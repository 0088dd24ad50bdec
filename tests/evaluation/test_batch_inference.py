"""Batch inference: post-processors, the journal, failed answers, and dry-run output."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.options import parse_config
from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import FirstStart
from openrlhf.data.prompts import AnsweredDataset
from openrlhf.evaluation import batch_inference, processes
from openrlhf.evaluation.batch_inference import keep
from openrlhf.evaluation.journal import Journal, start_of_request
from openrlhf.evaluation.post_processing import POST_PROCESSORS
from openrlhf.launch.identity import request_identity
from openrlhf.observability.display import Display
from tests.config.commands import ROOTS, parse
from tests.full_disk import files_of_at_most
from tests.tiny import HEADS, character_tokenizer, save_reward_model, save_tiny_model

ROWS = [
    {"input": question, "output": f"{question}{number}", "reward": reward}
    for number, (question, reward) in enumerate(
        [
            ("a", 0.5),
            ("b", -1.0),
            ("a", 2.25),
            ("c", 1.0),
            ("a", -0.125),
            ("b", 3.0),
            ("c", 1.0),
            ("a", 2.25),
        ]
    )
]


def processed(name: str, line: str = "", rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    return POST_PROCESSORS[name](
        rows, parse("batch_inference", f"--task rm --post_processor {name} {line}")
    )


def test_rejection_sampling_keeps_the_first_best_output_of_each_input() -> None:
    best: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        if row["input"] not in best or row["reward"] > best[row["input"]]["reward"]:
            best[row["input"]] = row
    assert processed("rs") == list(best.values())
    assert [row["output"] for row in processed("rs")] == ["a2", "b5", "c3"]


def test_pairs_contain_the_best_and_the_worst_output_if_their_rewards_differ() -> None:
    rewards: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in ROWS:
        rewards[row["input"]].append((row["reward"], row["output"]))
    rows = processed("iter_dpo")
    assert [row["prompt"] for row in rows] == ["a", "b"]
    for row in rows:
        group = rewards[row["prompt"]]
        assert row["chosen_reward"] == max(group)[0] and row["rejected_reward"] == min(group)[0]
        assert (row["chosen_reward"], row["chosen"]) in group and (
            row["rejected_reward"],
            row["rejected"],
        ) in group
    assert list(rows[0]) == ["prompt", "chosen", "chosen_reward", "rejected", "rejected_reward"]


def test_identical_outputs_form_no_pair_even_if_their_rewards_differ() -> None:
    """Rounding can make a reward model score the same text differently in different batches."""
    rows = [
        {"input": "a", "output": "x", "reward": reward} for reward in (0.124543868, 0.124543861)
    ]
    assert processed("iter_dpo", rows=rows) == []


def test_conditioned_input_contains_the_reward_with_two_decimals() -> None:
    rows = processed("csft")
    assert [row["input"] for row in rows[:3]] == [
        "a <rm_score>: 0.50 ",
        "b <rm_score>: -1.00 ",
        "a <rm_score>: 2.25 ",
    ]
    assert [(row["output"], row["reward"]) for row in rows] == [
        (row["output"], row["reward"]) for row in ROWS
    ]


def test_normalize_enable_uses_the_mean_and_the_unbiased_std_of_all_rows() -> None:
    mean = sum(row["reward"] for row in ROWS) / len(ROWS)
    deviation = math.sqrt(sum((row["reward"] - mean) ** 2 for row in ROWS) / (len(ROWS) - 1))
    rows = processed("csft", "--reward.normalize_enable --reward_template {reward}|{input}")
    assert [row["input"] for row in rows] == [
        f"{(row['reward'] - mean) / deviation:.2f}|{row['input']}" for row in ROWS
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_normalize_enable_maps_equal_rewards_to_zero(count: int) -> None:
    rows = [{"input": "{reward}", "output": "x", "reward": 0.1}] * count
    assert [row["input"] for row in processed("csft", "--reward.normalize_enable", rows)] == [
        "{reward} <rm_score>: 0.00 "
    ] * count


# ---- the journal


def results(path: Path, identity: dict[str, Any] | None = None) -> dict[int, Any]:
    journal = Journal(path, identity or {"--best_of_n": 2})
    return journal.results


def test_journal_truncated_at_any_byte_keeps_its_complete_rows_and_can_be_resumed(
    tmp_path: Path,
) -> None:
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


@pytest.mark.usefixtures("capsys")
def test_error_for_a_full_disk_names_the_journal_which_keeps_the_finished_rows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path, {"--best_of_n": 2})
    journal.add(5, ["a"])
    size = journal.path.stat().st_size
    with files_of_at_most(size + 3), pytest.raises(DataError, match=re.escape(str(journal.path))):
        journal.add(6, ["b"])
    assert results(path) == {5: ["a"]}


def test_journal_that_cannot_be_created_raises_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out.jsonl.part").mkdir()
    for path in (tmp_path / "file" / "out.jsonl", tmp_path / "out.jsonl"):
        with pytest.raises(DataError, match=f"--output_path: .*{path}.part"):
            Journal(path, {"--best_of_n": 2})


def test_journal_that_cannot_be_truncated_raises_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_read_only(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "ab":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, mode, **options)

    path = tmp_path / "out.jsonl"
    results(path)
    monkeypatch.setattr(Path, "open", open_read_only)
    with pytest.raises(DataError, match=f"--output_path: .*{path}.part"):
        Journal(path, {"--best_of_n": 2})


def test_existing_output_that_cannot_be_moved_aside_raises_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    finished(path, {"rows": 0})
    (tmp_path / "earlier").touch()
    with pytest.raises(DataError, match=f"--output_path: .*{path}"):
        Journal(path, {"rows": 1})
    assert path.read_text() == "{'rows': 0}\n"


def test_journal_with_different_settings_is_rejected_with_both_values(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results(path)
    with pytest.raises(DataError, match="--best_of_n: was 2, now 3"):
        results(path, {"--best_of_n": 3})
    assert results(path) == {}


def test_existing_output_of_the_same_or_an_unknown_request_is_rejected(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.jsonl"
    finished(path, {"--best_of_n": 2})
    for _ in range(2):
        with pytest.raises(DataError, match=f"--output_path {path}"):
            Journal(path, {"--best_of_n": 2})
        (tmp_path / "out.jsonl.request").unlink(missing_ok=True)
    assert path.read_text() == "{'--best_of_n': 2}\n"


def test_existing_output_of_a_different_request_is_moved_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In published scripts, all iterations write to the same path."""
    path = tmp_path / "generate.jsonl"
    for iteration in range(3):
        finished(path, {"rows": iteration})
    notices = capsys.readouterr().err.splitlines()
    kept = [tmp_path / "earlier" / name for name in ("1", "2")]
    assert len(notices) == len(kept)
    for notice, folder in zip(notices, kept, strict=True):
        assert notice.startswith("[notice] ")
        assert f"--output_path {path} " in notice and f" {folder}." in notice
    assert [(folder / path.name).read_text() for folder in kept] == [
        "{'rows': 0}\n",
        "{'rows': 1}\n",
    ]
    assert path.read_text() == "{'rows': 2}\n"


def finished(path: Path, identity: dict[str, Any]) -> None:
    """Write the results and the final file of a command with the given identity."""
    journal = Journal(path, identity)
    assert journal.results == {}
    journal.add(0, ["x"])
    path.write_text(f"{identity}\n")
    journal.finish()
    assert not journal.path.exists()


# ---- failed answers


class DisplayOnly:
    """A recorder that has only a display."""

    def __init__(self) -> None:
        self.display = Display(quiet=True)


def answers(row: int, *texts: str, error: str | None = None) -> list[Trajectory]:
    group: list[Trajectory] = []
    for number, text in enumerate(texts):
        builder = TrajectoryBuilder([1, 2])
        builder.append_action([3], [-1.0])
        prompt = Prompt(index=row, text="q", tokens=[1, 2])
        done = builder.finish(
            prompt=prompt, sample_index=number, stop_reason=StopReason.STOP, response_text=text
        )
        group.append(done.failing(error, Failure.ENGINE) if error and number else done)
    return group


def test_row_with_a_failed_answer_is_returned_but_not_journaled(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "out.jsonl", {})
    recorder: Any = DisplayOnly()
    failed = keep(
        [answers(0, "x", "y"), answers(2, "x", "y", error="no engine"), answers(1, "", "z")],
        journal,
        recorder,
    )
    assert [(t.prompt.index, t.error) for t in failed] == [(2, "no engine")]
    assert results(tmp_path / "out.jsonl", {}) == {0: ["x", "y"], 1: ["", "z"]}
    assert all(json.loads(line) is not None for line in journal.path.read_text().splitlines())


@pytest.mark.parametrize(("seconds", "notes"), [(1.0, 0), (0.05, 3)])
def test_progress_is_printed_once_per_interval_without_a_progress_bar(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    notes: int,
) -> None:
    """Three rows of two one-token answers, at ten rows per second, give 20 tokens per second."""
    clock = [0.0]

    def rows() -> Iterator[list[Trajectory]]:
        for row in range(3):
            clock[0] += 0.1
            yield answers(row, "x", "y")

    monkeypatch.setattr(batch_inference, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes, "NOTE_INTERVAL_S", seconds)
    recorder: Any = DisplayOnly()
    keep(rows(), Journal(tmp_path / "out.jsonl", {}), recorder)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == notes
    if printed:
        assert all(part in printed[-1] for part in ("3 rows", "0 rows failed", "20 tokens/s"))


# ---- reading rows, and dry-run output

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a language model with a chat template, and a reward model based on it."""
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {**HEADS, "max_position_embeddings": 4096}
    save_tiny_model(folder / "model", chat_template=TEMPLATE, **sizes)
    save_reward_model(folder / "reward", folder / "model")
    return folder


@pytest.fixture
def dry_run(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Return a function that does a dry run on rows and returns the run's output and notices."""

    def run(rows: list[dict[str, Any]], line: str) -> tuple[str, str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = (
            f"--reward.model_name_or_path {models}/reward"
            if "rm" in line.split()
            else f"--pretrain {models}/model"
        )
        places = f"--data.dataset {tmp_path}/rows.jsonl --output_path {tmp_path}/out.jsonl"
        words = f"{model} {places} {line} --ds.param_dtype fp32 --dry_run".split()
        config = parse_config(ROOTS["batch_inference"], words, command="batch_inference")
        batch_inference.run_batch_inference(config)
        return capsys.readouterr()

    return run


DATED = "{% for m in messages %}{{ strftime_now('%Y-%m-%d') + m['content'] }}{% endfor %}"


@pytest.mark.parametrize("other", ["", "seed", "row"])
def test_resumed_request_renders_rows_with_the_date_of_its_first_start(
    models: Path, tmp_path: Path, other: str
) -> None:
    """The date of a different, completed request is not used."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "x"}\n')
    final = tmp_path / "out.jsonl"
    words = (
        f"--pretrain {models}/model --data.dataset {source} --output_path {final} "
        "--data.input_key question --data.apply_chat_template"
    ).split()
    config = parse_config(ROOTS["batch_inference"], words, command="batch_inference")
    tokenizer = character_tokenizer()
    tokenizer.name_or_path, tokenizer.chat_template = str(models / "model"), DATED
    begun = FirstStart(moment="2027-01-15T12:00:00", trained_format=True)
    rows = batch_inference.load_rows(config)
    prompts, identity = batch_inference.rendered_rows(config, tokenizer, rows, begun)
    assert prompts[0].text == "2027-01-15x"
    request = request_identity(config, rows, tokenizer)
    journal = Journal(final, identity, request=request)
    final.touch()
    journal.finish()

    if other == "seed":
        config = parse_config(
            ROOTS["batch_inference"], [*words, "--train.seed", "7"], command="batch_inference"
        )
    elif other == "row":
        source.write_text('{"question": "x"}\n{"question": "y"}\n')
    rows = batch_inference.load_rows(config)
    request = request_identity(config, rows, tokenizer)
    found = start_of_request(final, request)
    assert (found == begun) == (not other)
    prompts, identity = batch_inference.rendered_rows(config, tokenizer, rows, found)
    assert (prompts[0].text == "2027-01-15x") == (not other)
    if other:
        Journal(final, identity, request=request)
    else:
        with pytest.raises(DataError):
            Journal(final, identity, request=request)


def test_different_request_with_the_same_rendered_rows_resumes_the_journal(tmp_path: Path) -> None:
    final = tmp_path / "out.jsonl"
    Journal(final, {"--best_of_n": 2}).add(0, ["a"])
    assert Journal(final, {"--best_of_n": 2}, request="one").results == {0: ["a"]}
    assert Journal(final, {"--best_of_n": 2}, request="other").results == {0: ["a"]}


def test_dry_run_prints_the_template_and_the_tokens_of_truncated_prompts(dry_run: Any) -> None:
    rows = [{"question": "123456789", "response": "x"}] * 3
    printed, noted = dry_run(
        rows, "--data.input_template q{}a --data.max_len 8 --rollout.max_new_tokens 4"
    )
    ids = " ".join(map(str, character_tokenizer()("789a")["input_ids"]))
    assert "Template: --data.input_template $'q{}a'." in printed
    assert f"--- row 2: 4 tokens, ids {ids}\n789a" in printed
    assert "row 3" not in printed and "label" not in printed
    assert "--data.input_key question. " in noted
    assert "output_key" not in noted


def test_dry_run_prints_the_suffix_for_conditional_fine_tuning(dry_run: Any) -> None:
    printed, noted = dry_run([{"input": "1+1="}], "--input_key input --csft.enable --csft.prompt 5")
    assert "\n1+1= 5 \n" in printed
    assert "layout" not in noted


def test_scoring_dry_run_marks_the_last_token_of_the_scored_text(
    dry_run: Any,
) -> None:
    rows = [
        {"input": "1+1=", "output": "2"},
        {"input": "1+1=", "output": ""},
        {"input": "2+2=", "output": "4<eos>"},
    ]
    rows.append({"input": "1+1+1", "output": "3"})
    printed, noted = dry_run(rows, "--task rm --data.max_len 6")
    lost = "1 whose prompt leaves no room for the answer (--data.max_len 6)"
    summary = (
        f"2 of 4 rows kept, dropped {lost}, 1 with an empty response. "
        "1 of the kept rows were truncated to 6 tokens"
    )
    assert summary in noted
    assert "--- row 1: 6 tokens, 1 targets, ids" in printed
    assert "\n1+1=2⟦<eos>⟧\n" in printed
    assert "\n2+2=4⟦<eos>⟧\n" in printed


CHAT: list[dict[str, str]] = [
    {"role": role, "content": text}
    for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))
]


@pytest.mark.parametrize("flag", ["", "--data.output_key="])
def test_last_chat_turn_is_the_answer_if_there_is_no_answer_column(dry_run: Any, flag: str) -> None:
    """The command comes from the published conditional fine-tuning script."""
    rows = [{"chosen": [*CHAT, {"role": "assistant", "content": "4"}], "rejected": [*CHAT]}]
    printed, noted = dry_run(
        rows, f"--eval_task rm --input_key chosen --apply_chat_template {flag}"
    )
    assert "Template: --data.apply_chat_template." in printed
    assert "\nu:1<eos>\na:2<eos>\nu:3<eos>\na:4⟦<eos>⟧\n" in printed
    assert "[notice] 1 of 1 rows kept." in noted


def test_prompt_and_answer_are_rendered_with_the_chat_template(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "reward")
    data = InferenceDataConfig(apply_chat_template=True, max_len=64)
    rows = Dataset.from_list([{"input": CHAT, "output": "4"}, {"input": CHAT, "output": "5"}])
    asked, answers = "u:1<eos>\na:2<eos>\nu:3<eos>\na:", ["4<eos>", "5<eos>"]
    read = AnsweredDataset(rows, tokenizer, data)
    assert [(row.text, row.label) for row in (read[0], read[1])] == [
        (asked, answer) for answer in answers
    ]
    whole = Dataset.from_list(
        [{"input": [*CHAT, {"role": "assistant", "content": text}]} for text in "45"]
    )
    same = AnsweredDataset(whole, tokenizer, replace(data, output_key=None))
    assert [same[row] for row in range(2)] == [read[row] for row in range(2)]
    plain = Dataset.from_list([{"input": "1", "output": "2\n"}])
    [row] = [AnsweredDataset(plain, tokenizer, InferenceDataConfig(input_template="q{}a"))[0]]
    assert (row.text, row.label, tokenizer.decode(row.tokens)) == ("q1a", "2\n", "q1a2 <eos>")


def test_plain_text_rows_without_an_answer_column_are_rejected(dry_run: Any) -> None:
    with pytest.raises(DataError, match=r"no column 'output', which --data\.output_key names"):
        dry_run([{"input": "1"}], "--task rm")
    with pytest.raises(DataError, match=r"--data\.output_key is not set"):
        dry_run([{"input": "1"}], "--task rm --data.output_key=")
