"""Episodes and the episode builder, which keeps per-token lists aligned."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.core.trajectory import Prompt, StopReason, Trajectory, TrajectoryBuilder

PROMPT = Prompt(index=3, text="2+2=", tokens=[7, 9, 7, 3])
TURNS = st.lists(
    st.one_of(
        st.tuples(
            st.just("action"), st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0)), max_size=5)
        ),
        st.tuples(st.just("feedback"), st.lists(st.integers(0, 99), max_size=5)),
    ),
    max_size=6,
)


def finish(builder: TrajectoryBuilder, **fields: Any) -> Trajectory:
    values = {"prompt": PROMPT, "sample_index": 0, "stop_reason": StopReason.STOP} | fields
    return builder.finish(**values)


def test_builder_example_in_the_docstring_is_correct() -> None:
    builder = TrajectoryBuilder(PROMPT.tokens)
    builder.append_action([5, 1], [-0.1, -0.2])
    trajectory = finish(builder)
    assert trajectory.tokens == [7, 9, 7, 3, 5, 1]
    assert trajectory.action_mask == [False] * 4 + [True] * 2
    assert trajectory.rollout_logprobs == [0, 0, 0, 0, -0.1, -0.2]
    assert trajectory.num_actions == 2


@given(st.lists(st.integers(0, 99), min_size=1, max_size=5), TURNS)
def test_builder_keeps_tokens_logprobs_and_action_mask_aligned(
    prompt: list[int], turns: list[tuple[str, list[Any]]]
) -> None:
    builder = TrajectoryBuilder(prompt)
    expected = [(token, False, 0.0) for token in prompt]
    for kind, items in turns:
        if kind == "action":
            builder.append_action([t for t, _ in items], [x for _, x in items])
            expected += [(token, True, logprob) for token, logprob in items]
        else:
            builder.append_feedback(items)
            expected += [(token, False, 0.0) for token in items]
    trajectory = finish(builder)
    columns = (trajectory.tokens, trajectory.action_mask, trajectory.rollout_logprobs)
    assert list(zip(*columns, strict=True)) == expected
    assert trajectory.num_actions == sum(acting for _, acting, _ in expected)


def test_builder_does_not_change_prompt_tokens() -> None:
    builder = TrajectoryBuilder(PROMPT.tokens)
    builder.append_action([5], [-0.1])
    builder.append_feedback([6])
    assert PROMPT.tokens == [7, 9, 7, 3]


def test_weight_versions_are_distinct_and_sorted_oldest_first() -> None:
    builder = TrajectoryBuilder([7])
    builder.append_action([5, 6], [-0.1, -0.2], versions=[4])
    builder.append_action([8], [-0.3], versions=[4, 5])
    assert finish(builder).weight_versions == (4, 5)


def test_append_action_with_missing_logprobs_raises_an_error() -> None:
    with pytest.raises(AssertionError):
        TrajectoryBuilder([7]).append_action([5, 6], [-0.1])


def test_lists_of_different_lengths_raise_an_error() -> None:
    with pytest.raises(AssertionError):
        Trajectory(
            tokens=[1, 2],
            action_mask=[True],
            rollout_logprobs=[0.0, 0.0],
            prompt=PROMPT,
            sample_index=0,
            stop_reason=StopReason.STOP,
        )


def test_sampled_first_token_raises_an_error() -> None:
    builder = TrajectoryBuilder([])
    builder.append_action([5], [-0.1])
    with pytest.raises(ValueError, match="first token"):
        finish(builder)


@pytest.mark.parametrize(
    ("reason", "truncated", "failed"),
    [
        (StopReason.STOP, False, False),
        (StopReason.LENGTH, True, False),
        (StopReason.FAILED, False, True),
    ],
)
def test_truncated_and_failed_are_derived_from_the_stop_reason(
    reason: StopReason, truncated: bool, failed: bool
) -> None:
    trajectory = finish(TrajectoryBuilder([7]), stop_reason=reason)
    assert (trajectory.truncated, trajectory.failed) == (truncated, failed)


def test_episode_survives_pickling() -> None:
    builder = TrajectoryBuilder(PROMPT.tokens)
    builder.append_action([5, 1], [-0.1, -0.2], versions=[2])
    trajectory = finish(builder, reward=1.0, extra_logs={"format": 0.5})
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory
