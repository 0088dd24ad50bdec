"""Hand-made episodes."""

from __future__ import annotations

from typing import Any

from openrlhf.core.trajectory import Prompt, StopReason, Trajectory


def episode(
    index: int = 0,
    sample: int = 0,
    *,
    score: float | None = None,
    actions: int = 1,
    stop: StopReason = StopReason.STOP,
    source: str = "default",
    text: str | None = None,
    **fields: Any,
) -> Trajectory:
    """Return an episode for prompt `index` with one prompt token and `actions` sampled tokens.

    The reward of the episode equals its score.
    """
    values: dict[str, Any] = {"reward": score, "score": score} | fields
    return Trajectory(
        tokens=list(range(1 + actions)),
        action_mask=[False] + [True] * actions,
        rollout_logprobs=[0.0] + [-0.5] * actions,
        prompt=Prompt(index=index, text=text or f"prompt {index}", tokens=[0], datasource=source),
        sample_index=sample,
        stop_reason=stop,
        **values,
    )


def failed(index: int = 0, sample: int = 0, *, source: str = "default") -> Trajectory:
    """Return a failed episode, which has an error but no reward or score."""
    return episode(index, sample, stop=StopReason.FAILED, source=source, error="it broke")
