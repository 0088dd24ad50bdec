"""Tests for the documentation: commands are accepted, links work, and pages are up to date."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest

from openrlhf.cli.main import VERBS
from openrlhf.config import machine
from openrlhf.config.flags import Flag, flags_of
from openrlhf.config.options import parse_config
from openrlhf.observability.glossary import find_spec
from tests.config.commands import ROOTS, violations
from tests.pages import (
    ALGORITHMS,
    CURVES,
    FLAG,
    LEARNED,
    METRICS,
    flag_sets,
    metrics_page,
    pages,
    relinked,
    rewritten,
    says_its_default,
)
from tests.sources import ROOT
from tests.verify import real_model
from tests.verify.learning import (
    CORRECTIONS,
    UNCORRECTED,
    LearningRun,
    by_name,
    page,
    read_runs,
    record,
    sparkline,
    summary,
)
from tests.verify.learning import RECORDS as LEARNING
from tests.verify.test_async_learning import RECORDS as ASYNCHRONOUS
from tests.verify.test_learning import RUNS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REAL_MODEL = ROOT / "examples/real_model"
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and arguments of every training command in the tutorial."""
    for block in re.findall(r"```bash\n(.*?)```", TUTORIAL, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"openrlhf\.cli\.(\w+) (.*)", line)
            if found:
                yield found[1], shlex.split(found[2], comments=True)


LAPTOP = (
    "train_sft",
    "train_ppo_ray",
    "train_rm",
    "train_ppo_ray",
    "train_sft",
    "train_dpo",
)  # this command is shown first
CLUSTER = ("train_sft", "train_ppo_ray")
COMMANDS = list(commands())
ON_LAPTOP, ON_CLUSTER = COMMANDS[: len(LAPTOP)], COMMANDS[len(LAPTOP) :]


def test_tutorial_shows_each_command_for_laptop_and_cluster() -> None:
    assert [name for name, _ in COMMANDS] == [*LAPTOP, *CLUSTER]


@pytest.mark.parametrize(
    ("command", "words", "gpus"),
    [(*laptop, 0) for laptop in ON_LAPTOP] + [(*cluster, 8) for cluster in ON_CLUSTER],
)
def test_tutorial_commands_are_accepted_on_their_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, words: list[str], gpus: int
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "preferences.csv").touch()
    for made_by_an_earlier_command in (word for word in words if word.startswith("runs/")):
        (tmp_path / made_by_an_earlier_command).mkdir(parents=True, exist_ok=True)
    assert parse_config(ROOTS[command], words, command=command).check() == []


EVALUATIONS = re.findall(
    r"^openrlhf eval ((?:.*\\\n)*.*)$", (ROOT / "docs/evaluation.md").read_text(), re.MULTILINE
)


INFERENCE = re.findall(
    r"^openrlhf (\w+ (?:.*\\\n)*.*)$", (ROOT / "docs/inference.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("line", [*(f"eval {line}" for line in EVALUATIONS), *INFERENCE])
def test_commands_on_evaluation_and_inference_pages_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    verb, *words = shlex.split(line.replace("\\\n", " "))
    command = VERBS[verb].command if verb in VERBS else verb
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for made_by_an_earlier_command in (word for word in words if word.startswith("runs/")):
        (tmp_path / made_by_an_earlier_command).mkdir(parents=True, exist_ok=True)
    for written_by_an_earlier_command in (
        word for word in words if re.fullmatch(r"\w+\.jsonl", word)
    ):
        (tmp_path / written_by_an_earlier_command).touch()
    assert parse_config(ROOTS[command], words, command=command).check() == []


def test_inference_page_commands_read_files_that_exist_or_were_written_earlier() -> None:
    known = {"runs/sft/model", "runs/rm/model", "prompts.jsonl"}
    unknown = []
    for line in INFERENCE:
        words = shlex.split(line.replace("\\\n", " "))
        written = {
            value
            for flag, value in pairwise(words)
            if flag in ("--output_path", "--ckpt.output_dir")
        }
        named = {word for word in words if re.fullmatch(r"runs/\S+|\w+\.jsonl", word)}
        unknown += sorted(named - written - known)
        known |= written
    assert unknown == []


def test_evaluation_and_inference_pages_have_a_command_for_each_task() -> None:
    assert (len(EVALUATIONS), len(INFERENCE)) == (3, 12)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_have_existing_targets(page: Path) -> None:
    text = page.read_text()
    links = {(page.parent / link).resolve() for link in re.findall(r"\]\((?!http)([^)#]+)", text)}
    named = {
        ROOT / path for path in re.findall(r"`((?:openrlhf|tests|docs|examples)/[\w/.]+)`", text)
    }
    assert [str(path) for path in sorted(links | named) if not path.exists()] == []


@pytest.mark.parametrize(
    ("verb", "file"),
    re.findall(
        r"openrlhf (\w+) --config (\S+)", (REAL_MODEL / "README.md").read_text(encoding="utf-8")
    ),
)
def test_flag_files_of_the_real_model_example_are_accepted(
    verb: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's first command writes the data that the files refer to."""
    for name in re.findall(r"\bdata/[\w/.]+", (ROOT / file).read_text(encoding="utf-8")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    command = VERBS[verb].command
    parse_config(ROOTS[command], ["--config", str(ROOT / file)], command=command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_a_page_point_to_a_heading(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }
    assert sorted(set(re.findall(r"\]\(#([^)]+)\)", text)) - anchors) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_mentioned_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_metrics_page_is_up_to_date_with_glossary() -> None:
    """`make docs` rewrites the page."""
    assert METRICS.read_text() == metrics_page()


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_symbol_links_and_curves_are_up_to_date(
    path: Path,
) -> None:
    """`make docs` updates links and curves."""
    assert path.read_text() == rewritten(path)


def test_symbol_link_points_to_definition_and_undefined_symbol_is_an_error() -> None:
    stale = "[`advantages.gae`](somewhere/else.py#L1)"
    assert (
        relinked(stale, ROOT / "docs") == "[`advantages.gae`](../openrlhf/algorithms/advantages.py)"
    )
    assert (
        relinked("[`gsm8k`](results/gsm8k.md), [README](../README.md)", ROOT)
        == "[`gsm8k`](results/gsm8k.md), [README](../README.md)"
    )
    with pytest.raises(ValueError, match=r"advantages\.gone is defined 0 times"):
        relinked("[`advantages.gone`]()", ROOT)


@cache
def all_flags() -> dict[str, Flag]:
    """Return the flags of all commands. For a shared flag, RL's definition takes precedence."""
    return {
        path: flag
        for command in ("train_sft", "train_rm", "train_ppo_ray")
        for path, flag in flags_of(ROOTS[command]).items()
    }


METHODS = pytest.mark.parametrize(
    "path", [ROOT / "docs/ppo_details.md", ROOT / "docs/algorithms.md"], ids=lambda path: path.name
)


@METHODS
def test_every_mentioned_metric_is_declared(path: Path) -> None:
    named = set(re.findall(r"`((?:train|rollout|eval)/\w+)`", path.read_text()))
    assert [name for name in sorted(named) if find_spec(name) is None] == []


@METHODS
def test_every_mentioned_flag_exists_and_every_stated_default_is_correct(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"(?<![\w-])--([a-z][\w.]*)", text))
    assert sorted(named - all_flags().keys() - {"flag"}) == []
    defaults = [(name, said) for name, said in FLAG.findall(text) if name in all_flags() and said]
    assert len(defaults) > 10
    assert [
        f"--{name} ({said})"
        for name, said in defaults
        if not says_its_default(all_flags()[name], said)
    ] == []


@pytest.mark.parametrize(
    ("path", "said", "right"),
    [
        ("actor.eps_clip", "0.2", True),
        ("actor.eps_clip", "0.3", False),
        ("actor.adam.eps", "1e-8", True),
        ("reward.clip_range", "-10 10", True),
        ("reward.clip_range", "-5 5", False),
        ("algo.kl.use_loss", "off", True),
        ("algo.kl.use_loss", "on", False),
        ("algo.kl.target", "unset", True),
        ("algo.kl.target", "6", False),
        ("algo.kl.estimator", "k1", True),
    ],
)
def test_defaults_may_be_written_in_any_notation(path: str, said: str, right: bool) -> None:
    assert says_its_default(all_flags()[path], said) == right


@pytest.mark.parametrize("name", flag_sets())
def test_flags_of_every_method_are_accepted(name: str) -> None:
    assert violations("train_ppo_ray", " ".join(flag_sets()[name])) == []


def test_page_shows_flags_and_curve_of_every_learning_run() -> None:
    marks = [name for _, name, _ in LEARNED.findall(ALGORITHMS.read_text())]
    assert sorted(marks) == sorted(RUNS)
    assert RUNS.keys() <= flag_sets().keys()


def test_real_model_page_matches_recorded_runs() -> None:
    assert real_model.PAGE.read_text(encoding="utf-8") == real_model.page(real_model.read_runs())


@pytest.mark.parametrize("path", [LEARNING, ASYNCHRONOUS], ids=lambda path: path.stem)
def test_no_two_recorded_runs_have_the_same_curve(path: Path) -> None:
    """If a flag does not change the curve, the run has not tested the flag."""
    curves = Counter((run.seed, *run.solved, *run.pass_at_1) for run in read_runs(path))
    assert curves
    assert max(curves.values()) == 1


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_affects_learning_from_stale_samples_more_than_seeds_do(
    name: str,
) -> None:
    runs = by_name(read_runs())
    corrected, uncorrected = ([run.gain for run in runs[each]] for each in (name, UNCORRECTED))
    assert len(corrected) == len(uncorrected) == 3
    spread = max(stdev(corrected), stdev(uncorrected))
    assert fmean(corrected) - fmean(uncorrected) > spread


def test_learning_runs_page_matches_recorded_runs(tmp_path: Path) -> None:
    runs = read_runs()
    assert not runs or CURVES.read_text() == page(runs)
    path = tmp_path / "learning.jsonl"
    run = LearningRun(
        name="rloo",
        seed=1,
        flags="",
        solved=[0.0] * 5 + [0.5] * 6 + [1.0] * 5,
        pass_at_1=[0.1, 0.9],
        seconds=40,
        versions="v",
    )
    for each in (run, run):  # the second record replaces the first
        record(each, path)
    assert read_runs(path) == [run]
    assert sparkline(run.solved) == "▁▁▁▁▁▅▅▅▅▅▅█████"
    assert summary([run]) == "0.00 → 1.00 ▁▁▁▁▁▅▅▅▅▅▅█████ held out 0.10 → 0.90"
    assert "| rloo | 0.00 → 1.00 | 0.10 → 0.90 | ▁▁▁▁▁▅▅▅▅▅▅█████ | 40 |" in page([run])
