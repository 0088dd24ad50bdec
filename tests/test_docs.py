"""The documents keep their promises: commands that are accepted, links that lead somewhere, pages that are up to date."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.config import machine
from openrlhf.config.options import parse_config
from openrlhf.observability.glossary import glossary_markdown
from tests.config.commands import ROOTS
from tests.sources import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every training command of the README: its name and its words."""
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"openrlhf\.cli\.(\w+) (.*)", line)
            if found:
                yield found[1], shlex.split(found[2], comments=True)


LAPTOP = ("train_sft", "train_ppo_ray", "train_rm", "train_ppo_ray")  # shown first
CLUSTER = ("train_sft", "train_ppo_ray")
COMMANDS = list(commands())
ON_LAPTOP, ON_CLUSTER = COMMANDS[: len(LAPTOP)], COMMANDS[len(LAPTOP) :]


def test_the_readme_shows_each_command_on_a_laptop_and_on_a_cluster() -> None:
    assert [name for name, _ in COMMANDS] == [*LAPTOP, *CLUSTER]


@pytest.mark.parametrize(
    ("command", "words", "gpus"), [(*laptop, 0) for laptop in ON_LAPTOP] + [(*cluster, 8) for cluster in ON_CLUSTER]
)
def test_its_commands_are_accepted_on_their_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, words: list[str], gpus: int
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for made_by_an_earlier_command in (word for word in words if word.startswith("runs/")):
        (tmp_path / made_by_an_earlier_command).mkdir(parents=True, exist_ok=True)
    assert parse_config(ROOTS[command], words, command=command).check() == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = {(page.parent / link).resolve() for link in re.findall(r"\]\((?!http)([^)#]+)", text)}
    named = {ROOT / path for path in re.findall(r"`((?:openrlhf|tests|docs|examples)/[\w/.]+)`", text)}
    assert [str(path) for path in sorted(links | named) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_the_page_of_metrics_is_the_glossary() -> None:
    """`make docs` writes it anew."""
    assert (ROOT / "docs/metrics.md").read_text() == glossary_markdown()
