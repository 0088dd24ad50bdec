"""Tests of an engine's sleeping and waking parts, with a fake vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

from openrlhf.rollout.engine import RolloutEngine


class FakeVLLM:
    """Records the parts in device memory. Like some versions, sleeps only if all are awake."""

    errored = False

    def __init__(self) -> None:
        self.awake = {"weights", "kv_cache"}

    async def sleep(self, level: int) -> None:
        if len(self.awake) == 2:
            self.awake.clear()

    async def wake_up(self, tags: list[str]) -> None:
        self.awake |= set(tags)


def test_engine_with_only_its_weights_awake_goes_back_to_sleep() -> None:
    """A publication wakes the weights, and no sample may follow before the next update."""
    engine = RolloutEngine(0)
    fake: Any = FakeVLLM()
    engine._llm = fake

    async def publish_between_two_rests() -> None:
        await engine.sleep()
        assert not fake.awake
        await engine._wake("weights")  # as in `receive`
        assert fake.awake == {"weights"}
        await engine.sleep()

    asyncio.run(publish_between_two_rests())
    assert not fake.awake
