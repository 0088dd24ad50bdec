"""Fixtures that give every test in this package a private, offline datasets cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def private_offline_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Prevent tests from using the Hub and the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a text file to the test's folder and return its path."""

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write_file
