"""Tests for converting an episode's reward to token rewards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.rewards import (
    clip_rewards,
    last_action,
    overlong_penalty,
    stop_properly_penalty,
    token_rewards,
)
from tests.reference import credit

# One row has two turns around a tool response, one has no actions, and one has only actions.
MASK = torch.tensor(
    [
        [False, True, True, False, True, False],
        [False, False, False, False, False, False],
        [True, True, True, True, True, True],
    ]
)


def test_overlong_penalty_grows_only_within_the_buffer() -> None:
    lengths = torch.tensor([0, 79, 80, 90, 100, 500])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20.0, factor=2.0)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -1.0, -2.0, -2.0]


def test_overlong_penalty_uses_the_limit_of_each_sample() -> None:
    lengths = torch.tensor([50, 50])
    penalty = overlong_penalty(lengths, max_length=torch.tensor([100, 55]), buffer=10.0)
    assert penalty.tolist() == [0.0, -0.5]


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1),
    longest=st.integers(1, 200),
    share=st.floats(0.01, 1),
    factor=st.floats(0, 3),
)
def test_overlong_penalty_matches_the_reference(
    lengths: list[int], longest: int, share: float, factor: float
) -> None:
    penalty = overlong_penalty(
        torch.tensor(lengths), max_length=longest, buffer=share * longest, factor=factor
    )
    expected = [credit.overlong(length, longest, share * longest, factor) for length in lengths]
    assert penalty.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(0.5, [1.0, -2.0]), (0.0, [0.0, -2.0]), (1.0, [2.0, -2.0]), (-3.0, [-3.0, -2.0])],
)
def test_rewards_of_truncated_samples_are_scaled_or_replaced_by_a_penalty(
    coef: float, expected: list[float]
) -> None:
    truncated = torch.tensor([True, False])
    assert stop_properly_penalty(torch.tensor([2.0, -2.0]), truncated, coef).tolist() == expected


def test_rewards_are_clipped() -> None:
    assert clip_rewards(torch.tensor([-12.0, 3.0, 12.0]), -10.0, 10.0).tolist() == [
        -10.0,
        3.0,
        10.0,
    ]


def test_last_action_of_each_row_is_marked() -> None:
    assert last_action(MASK).nonzero().tolist() == [[0, 4], [2, 5]]


def test_token_rewards_match_a_worked_example() -> None:
    """β = 0.1 subtracts 0.1 · kl from each action token; the last action also gets reward 5."""
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0, 9.0]])
    rewards = token_rewards(torch.tensor([5.0]), kl, MASK[:1], 0.1)
    assert torch.allclose(rewards, torch.tensor([[0.0, -0.1, -0.2, 0.0, 4.7, 0.0]]))


def test_token_rewards_match_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    kl, outcome = torch.randn(3, 6, generator=generator), torch.randn(3, generator=generator)
    expected = [
        credit.token_rewards(r, k, m, 0.3)
        for r, k, m in zip(outcome.tolist(), kl.tolist(), MASK.tolist(), strict=True)
    ]
    assert torch.allclose(token_rewards(outcome, kl, MASK, 0.3), torch.tensor(expected))


def test_token_rewards_without_kl_equal_the_outcome() -> None:
    outcome, kl = torch.tensor([1.0, 2.0, 3.0]), torch.full((3, 6), float("nan"))
    bare = token_rewards(outcome, None, MASK, 0.1)
    assert bare.sum(1).tolist() == [1.0, 0.0, 3.0]
    assert torch.equal(token_rewards(outcome, kl, MASK, 0.0), bare)
    assert torch.equal(token_rewards(outcome, kl, MASK, -1.0), bare), "a negative β counts as 0"


def test_nan_kl_outside_the_action_mask_is_ignored() -> None:
    kl = torch.where(MASK, 1.0, float("nan"))
    assert token_rewards(torch.zeros(3), kl, MASK, 1.0).sum(1).tolist() == [-3.0, 0.0, -6.0]


@given(
    acting=st.lists(st.booleans(), min_size=1, max_size=12),
    reward=st.floats(-5, 5),
    coef=st.floats(0, 1),
)
def test_token_rewards_of_a_row_sum_to_the_reward_minus_kl(
    acting: list[bool], reward: float, coef: float
) -> None:
    mask, kl = torch.tensor([acting]), torch.arange(float(len(acting)))[None].double()
    tokens = token_rewards(torch.tensor([reward], dtype=torch.float64), kl, mask, coef)
    expected = reward - coef * float(kl[mask].sum()) if any(acting) else 0.0
    assert float(tokens.sum()) == pytest.approx(expected, abs=1e-9)
    assert not tokens[~mask].any()


def test_turn_rewards_stay_in_their_turns_and_the_last_action_gets_the_remainder() -> None:
    """The reward of 2 was clipped to 1.5. The first turn earned 0.5, so 1 remains.

    The mask is [F, T, T, F, T, F].
    """
    mask = torch.tensor([[False, True, True, False, True, False]])
    turns = torch.tensor(
        [[9.0, 0.0, 0.5, 9.0, 0.0, 9.0]]
    )  # values outside the mask do not belong to any turn
    assert token_rewards(torch.tensor([1.5]), None, mask, 0.0, turns).tolist() == [
        [0, 0, 0.5, 0, 1.0, 0]
    ]
