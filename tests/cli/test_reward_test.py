"""Output and exit status of `openrlhf reward test`."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from openrlhf.cli import main
from openrlhf.config.options import ConfigError, parse_config
from openrlhf.config.reward_test import RewardTestConfig
from tests.openai_server import openai_server
from tests.tiny import save_tiny_model

MOODY = """
import os, time
def reward_func(queries, prompts, labels):
    if labels[0] == "hang": time.sleep(100)
    if labels[0] == "exit": os._exit(3)
    if labels[0] == "raise": raise ValueError("no way")
    if labels[0] == "text": return {"rewards": ["good"]}
    return {"rewards": [float(len(queries[0]) - len(prompts[0]))] * len(queries)}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "moody.py").write_text(MOODY)
    return tmp_path


def rows(folder: Path, labels: list[str]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"input": "2+2=", "output": label, "said": "x" * i}) + "\n"
            for i, label in enumerate(labels)
        )
    )
    return file


def reward_test(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Return the exit status and the output, which does not depend on the terminal's width."""
    with pytest.raises(SystemExit) as ended:
        main.main(["reward", "test", *map(str, words)])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), " ".join((printed.out + printed.err).split())


def test_reward_test_prints_scores_durations_and_errors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(folder, ["fine"] * 16 + ["hang", "exit", "raise", "text"])
    shared = ("--reward.remote_url", folder / "moody.py", "--reward.timeout", 1,
              "--reward.workers", 2, "--data.prompt_dataset", data,
              "--data.label_key", "output", "--data.output_key", "said")  # fmt: skip
    status, printed = reward_test(capsys, *shared, "--reward.max_error_rate", 0.2)
    assert status == 0
    assert "20 in" in printed and "2 at a time" in printed
    assert "mean 7.5, deviation 4.61, from 0 to 15" in printed
    assert "errors 4 (20.0%)" in printed
    assert all(f"{kind} 1" in printed for kind in ("timeout", "exit", "exception", "result"))
    times = re.search(r"time of a call median .* 99 % within (\S+) s, longest (\S+) s", printed)
    assert times and times[1] == times[2]  # one of 20 calls is 5 %
    assert "in reward_func" in printed and "exited with status 3" in printed
    status, _ = reward_test(capsys, *shared)
    assert status == 1  # --reward.max_error_rate is 0.1


def test_reward_test_prints_the_output_of_the_reward_function(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chatty.py").write_text(
        "def reward_func(queries, prompts, labels):\n    print('saw', labels)\n    return [1.0]\n"
    )
    data = rows(folder, ["x", "y"])
    flags = (
        "--reward.remote_url",
        folder / "chatty.py",
        "--data.prompt_dataset",
        data,
        "--data.label_key",
        "output",
    )
    status, printed = reward_test(capsys, *flags)
    assert status == 0 and "saw ['x']" in printed and "saw ['y']" in printed


@pytest.mark.verify
def test_reward_function_can_query_a_remote_engine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "judged.py").write_text(
        "from openrlhf.utils import remote_engine\n"
        "def reward_func(queries, prompts, labels):\n"
        "    said = remote_engine('judge').chat_sync([{'role': 'user', 'content': prompts[0]}])\n"
        "    return [float(said == prompts[0].upper())]\n"
    )
    data = rows(folder, ["x", "y"])
    flags = ("--reward.remote_url", folder / "judged.py", "--data.prompt_dataset", data,
             "--data.label_key", "output", "--reward.timeout", 5, "--reward.retries", 0,
             "--rollout.remote_engines")  # fmt: skip
    with openai_server() as server:
        status, printed = reward_test(capsys, *flags, f"judge={server.url}")
    assert status == 0 and "mean 1," in printed
    status, printed = reward_test(capsys, *flags, f"judge={server.url}")
    assert status == 2 and "--rollout.remote_engines" in printed


def test_labels_are_scored_as_correct_answers_if_there_is_no_response_column(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(folder, ["4", "0.5", r"\frac{1}{2}"])
    status, printed = reward_test(
        capsys,
        "--reward.verifier",
        "math",
        "--data.prompt_dataset",
        data,
        "--data.label_key",
        "output",
    )
    assert status == 0
    assert "mean 1, deviation 0, from 1 to 1" in printed and "errors 0 (0.0%)" in printed


def test_labels_in_csv_files_stay_strings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.csv").write_text("input,output,said\n3+4=,007,08\n")
    (folder / "exact.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return [float(labels == ['007'] and queries == ['3+4=08'])]\n"
    )
    flags = (
        "--reward.remote_url",
        folder / "exact.py",
        "--data.prompt_dataset",
        folder / "rows.csv",
    )
    status, printed = reward_test(
        capsys, *flags, "--data.label_key", "output", "--data.output_key", "said"
    )
    assert status == 0 and "mean 1," in printed


def test_responses_get_the_eos_token_of_the_model_and_wrong_answers_are_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "strict.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return [float(queries[0] == prompts[0] + labels[0] + '<eos>')]\n"
    )
    save_tiny_model(folder / "model")
    data = rows(folder, ["4", "5", "6"])
    flags = (
        "--reward.remote_url",
        folder / "strict.py",
        "--data.prompt_dataset",
        data,
        "--data.label_key",
        "output",
    )
    status, printed = reward_test(capsys, *flags, "--actor.model_name_or_path", folder / "model")
    assert (
        status == 0
        and "mean 1, deviation 0" in printed
        and "(labels of other rows): 3, mean reward 0" in printed
    )
    status, printed = reward_test(capsys, *flags)
    assert "mean 0, deviation 0" in printed and "pass --actor.model_name_or_path" in printed


def test_complete_output_is_kept_at_the_printed_path(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chatty.py").write_text(
        "import os\ndef reward_func(queries, prompts, labels):\n    print('hello'); os._exit(3)\n"
    )
    flags = ("--data.prompt_dataset", rows(folder, ["x"]), "--data.label_key", "output")
    _, printed = reward_test(capsys, "--reward.remote_url", folder / "chatty.py", *flags)
    [logs] = log_folders(folder)
    assert f"Output in {logs}/" in printed and f"complete output in {logs})" in printed
    assert any("hello" in log.read_text() for log in logs.iterdir())
    status, _ = reward_test(capsys, "--reward.verifier", "math", *flags)
    assert status == 0 and log_folders(folder) == [logs], "a silent one leaves nothing"


def log_folders(folder: Path) -> list[Path]:
    return list(folder.glob("openrlhf-reward-test-*"))


def test_output_without_errors_leaves_no_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = run_function(
        folder, capsys, "    print('hello')\n    return [float(queries[0][-1] == labels[0])]\n"
    )
    assert status == 0 and "hello" in printed
    assert log_folders(folder) == [] and not (folder / "runs").exists()


def test_reward_file_that_fails_to_load_leaves_no_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("def reward_func(:\n")
    data = rows(folder, ["4"])
    with pytest.raises(SystemExit):
        main.main(["reward", "test", "--reward.remote_url", str(folder / "broken.py"),
                   "--data.prompt_dataset", str(data), "--data.label_key", "output"])  # fmt: skip
    printed = capsys.readouterr().err
    assert "SyntaxError: " in printed
    assert not printed.endswith("\n\n")
    assert log_folders(folder) == []


def run_function(
    folder: Path, capsys: pytest.CaptureFixture[str], body: str, *flags: str
) -> tuple[int, str]:
    """Run the command on three rows with a reward function that has the given body."""
    (folder / "tried.py").write_text(f"def reward_func(queries, prompts, labels):\n{body}")
    data = folder / "rows.jsonl"
    lines = [json.dumps({"input": f"{n}+0=", "output": str(n)}) + "\n" for n in (4, 5, 6)]
    data.write_text("".join(lines))
    return reward_test(
        capsys, "--reward.remote_url", folder / "tried.py", "--data.prompt_dataset", data,
        "--data.label_key", "output", *flags,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("returned", "is_warned"),
    [
        ('{"rewards": [1.0]}', True),
        ("[1.0] * len(queries)", True),
        ("[float(queries[0] == prompts[0] + labels[0])]", False),
    ],
)
def test_reward_that_ignores_the_answer_prints_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], returned: str, is_warned: bool
) -> None:
    status, printed = run_function(folder, capsys, f"    return {returned}\n")
    assert status == 0
    assert (
        "[warning] All right and wrong answers have the same reward, 1." in printed
    ) == is_warned


def test_batched_function_that_returns_too_few_rewards_fails_on_single_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "    return [float(len(queries[0]))]\n"
    assert run_function(folder, capsys, body)[0] == 0
    status, printed = run_function(folder, capsys, body, "--reward.batch")
    assert status == 1
    assert "returned 1 rewards for 2 samples" in printed


def test_error_shared_by_several_rows_is_printed_once_with_a_count(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = run_function(folder, capsys, "    return [undefined]\n")
    assert status == 1
    assert printed.count("NameError") == 1
    assert "exception in 3 row(s), first with '4'" in printed


def test_batch_mode_scores_adjacent_rows_with_the_same_prompt_in_one_call(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(folder, ["fine"] * 3)
    flags = ("--reward.remote_url", folder / "moody.py", "--reward.batch",
             "--data.prompt_dataset", data, "--data.label_key", "output")  # fmt: skip
    status, printed = reward_test(capsys, *flags)
    assert status == 0
    assert "mean 4, deviation 0, from 4 to 4" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data.label_key output", "There is no reward to test: set --reward.remote_url"),
        ("--reward.verifier format", "There is nothing to score"),
        (
            "--reward.verifier math --data.output_key said",
            "--reward.verifier math checks responses against labels",
        ),
        ("--reward.remote_url gone.py --data.label_key output", "--reward.remote_url gone.py"),
        (
            "--reward.verifier math --reward.remote_url http://h --data.label_key output",
            "leave out one of them",
        ),
    ],
)
def test_invalid_flags_are_reported_before_scoring(folder: Path, words: str, said: str) -> None:
    data = rows(folder, ["fine"])
    with pytest.raises(ConfigError, match=said):
        parse_config(
            RewardTestConfig,
            ["--data.prompt_dataset", str(data), *words.split()],
            command="reward_test",
        )


def test_invalid_data_and_files_exit_with_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(folder, ["fine"])
    common = ("--data.prompt_dataset", data, "--data.label_key")
    status, printed = reward_test(capsys, "--reward.verifier", "math", *common, "no_such_column")
    assert status == 2 and "has no column 'no_such_column'" in printed
    (folder / "broken.py").write_text("def reward_func(:\n")
    status, printed = reward_test(
        capsys, "--reward.remote_url", folder / "broken.py", *common, "output"
    )
    assert status == 2 and "SyntaxError" in printed


def test_mistakes_in_the_data_and_the_reward_file_are_reported_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("def reward(queries):\n    return [1.0]\n")
    status, printed = reward_test(
        capsys, "--reward.remote_url", folder / "broken.py",
        "--data.prompt_dataset", rows(folder, ["x"]), "--data.label_key", "answer",
    )  # fmt: skip
    assert status == 2
    assert "2 mistakes" in printed
    assert "--data.label_key" in printed and "reward_func" in printed
