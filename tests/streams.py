"""Synchronous access to a generator's results, for tests that are not async."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.generator import Generator, Request, SamplingSpec, in_prompt_order


def rollout(
    generator: Generator,
    prompts: Iterable[Prompt],
    spec: SamplingSpec,
    *,
    step: int = 1,
    loop: BackgroundLoop | None = None,
    **request: Any,
) -> list[Trajectory]:
    """Return the samples for all prompts, in prompt order.

    Without `loop`, a temporary event loop is used.
    """
    if loop is None:
        with closing(BackgroundLoop()) as loop:
            return rollout(generator, prompts, spec, step=step, loop=loop, **request)
    asked = list(prompts)
    stream = generator.stream(asked, Request(spec=spec, step=step, **request), groups=len(asked))
    return in_prompt_order(loop.iterate(stream, 60))
