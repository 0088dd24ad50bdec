"""Fixtures that simulate a machine without a launcher or a GPU; tests can request GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openrlhf.config import machine


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "installed_gpus", lambda: 0)


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that simulates GPUs, with or without the flash-attn package."""

    def have(gpus: int, *, flash_attention: bool = True) -> None:
        monkeypatch.setattr(machine, "installed_gpus", lambda: gpus)
        monkeypatch.setattr(machine, "has_flash_attention", lambda: flash_attention)

    return have
