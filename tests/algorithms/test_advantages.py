"""Reward shaping within a prompt, and credit assignment over a row's tokens."""

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    EstimatorError,
    gae,
    group_statistics,
    monte_carlo,
    normalize_advantages,
    shape_rewards,
)
from openrlhf.algorithms.rewards import clip_rewards, token_rewards
from tests.reference import credit

ALL = ["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce"]
PER_GROUP = ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"]

# Multiples of ¼ are exact in binary, so rounding does not affect the tested properties.
quarters = st.integers(-40, 40).map(lambda n: n / 4)
batches = st.lists(st.tuples(quarters, st.integers(0, 4)), min_size=1, max_size=20)


def shaped(
    name: str, rewards: list[float], groups: list[int], dtype: torch.dtype = torch.float64
) -> Tensor:
    group = torch.tensor(groups, dtype=torch.long)
    return shape_rewards(torch.tensor(rewards, dtype=dtype), group, ADVANTAGE_ESTIMATORS[name])


def random_block(rows: int = 5, width: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Draw float64 token rewards and values, and a mask with gaps, an empty row and a full row."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    values = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[0], mask[1] = False, True
    return rewards, values, mask


# The registry


def test_estimators_declare_their_requirements() -> None:
    table = {
        name: (entry.traits.needs_critic, entry.traits.per_group, entry.traits.whiten)
        for name, entry in ((name, ADVANTAGE_ESTIMATORS[name]) for name in ADVANTAGE_ESTIMATORS)
    }
    #                     critic, groups, whitened
    assert table == {
        "gae": (True, False, True),
        "reinforce": (False, False, True),
        "reinforce_baseline": (False, True, True),
        "rloo": (False, True, False),
        "group_norm": (False, True, False),
        "dr_grpo": (False, True, False),
        "flash_reinforce": (False, False, False),
    }


# Reward shaping within a prompt


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gae", [1.0, 0.0, 0.0, 3.0, 5.0]),
        ("reinforce", [1.0, 0.0, 0.0, 3.0, 5.0]),
        ("reinforce_baseline", [2 / 3, -1 / 3, -1 / 3, -1.0, 1.0]),
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, -1.0, 1.0]),
        ("flash_reinforce", [-0.8, -1.8, -1.8, 1.2, 3.2]),  # the batch mean is 1.8
        ("rloo", [1.0, -1 / 2, -1 / 2, -2.0, 2.0]),  # leave-one-out means: 0, ½, ½ and 5, 3
        ("group_norm", [2 * 3**-0.5, -(3**-0.5), -(3**-0.5), -(0.5**0.5), 0.5**0.5]),
    ],
)
def test_reward_shaping_matches_a_worked_example_with_two_prompts(
    name: str, expected: list[float]
) -> None:
    """The rewards are 1, 0, 0 (mean ⅓, std √⅓) and 3, 5 (mean 4, std √2), in any sample order."""
    groups = [7, 7, 7, 2, 2]
    assert shaped(name, [1.0, 0.0, 0.0, 3.0, 5.0], groups).tolist() == pytest.approx(expected)
    mixed = shaped(name, [3.0, 0.0, 1.0, 5.0, 0.0], [2, 7, 7, 2, 7]).tolist()
    assert mixed == pytest.approx([expected[i] for i in (3, 1, 0, 4, 2)])


@pytest.mark.parametrize("name", ALL)
@given(batch=batches)
def test_reward_shaping_matches_the_reference(name: str, batch: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    assert shaped(name, rewards, groups).tolist() == pytest.approx(
        credit.shaped(name, rewards, groups), abs=1e-9
    )


@pytest.mark.parametrize("name", PER_GROUP)
@given(batch=batches)
def test_shaped_rewards_of_a_prompt_sum_to_zero(name: str, batch: list[tuple[float, int]]) -> None:
    groups = torch.tensor([g for _, g in batch])
    result = shaped(name, [r for r, _ in batch], groups.tolist())
    sums = torch.zeros(5, dtype=torch.float64).index_add(0, groups, result)
    assert torch.allclose(sums, torch.zeros_like(sums), atol=1e-9)


@pytest.mark.parametrize("name", PER_GROUP)
@given(batch=batches, shift=quarters)
def test_reward_shaping_ignores_a_constant_added_to_all_rewards_of_a_prompt(
    name: str, batch: list[tuple[float, int]], shift: float
) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    moved = [r + shift * g for r, g in batch]  # a different constant for each prompt
    assert torch.equal(shaped(name, rewards, groups), shaped(name, moved, groups))


@given(batch=batches, factor=st.sampled_from([0.25, 2.0, 64.0]))
def test_group_norm_ignores_the_scale_of_all_rewards_of_a_prompt(
    batch: list[tuple[float, int]], factor: float
) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    scaled = shaped("group_norm", [r * factor for r in rewards], groups)
    assert torch.allclose(scaled, shaped("group_norm", rewards, groups), atol=1e-6)


@pytest.mark.parametrize("name", ALL)
@given(batch=batches, randomness=st.randoms())
def test_reward_shaping_does_not_depend_on_sample_order(
    name: str, batch: list[tuple[float, int]], randomness: Random
) -> None:
    order = list(range(len(batch)))
    randomness.shuffle(order)
    plain = shaped(name, [r for r, _ in batch], [g for _, g in batch])
    shuffled = shaped(name, [batch[i][0] for i in order], [batch[i][1] for i in order])
    assert torch.allclose(shuffled, plain[order])


@pytest.mark.parametrize("name", PER_GROUP)
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, -1 / 3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_are_shaped_to_exactly_zero(
    name: str, reward: float, dtype: torch.dtype
) -> None:
    """In float32 the mean of eight 0.1s is not 0.1, and the tiny std would amplify the error."""
    result = shaped(name, [reward] * 8 + [0.0, 1.0], [0] * 8 + [1, 1], dtype)
    assert not result[:8].any()
    assert result[8:].all()


@pytest.mark.parametrize("name", PER_GROUP)
def test_only_sample_of_a_prompt_is_shaped_to_zero(name: str) -> None:
    assert shaped(name, [5.0, 1.0, 3.0], [0, 1, 1])[0].item() == 0.0


def test_group_statistics_match_a_worked_example() -> None:
    stats = group_statistics(torch.tensor([1.0, 0.0, 3.0, 8.0, 5.0]), torch.tensor([4, 4, 9, 1, 9]))
    assert stats.size.tolist() == [2, 2, 2, 1, 2]
    assert stats.std.tolist() == pytest.approx(
        [math.sqrt(0.5)] * 2 + [math.sqrt(2), 0, math.sqrt(2)]
    )


def test_reward_shaping_accepts_an_empty_batch() -> None:
    assert all(shaped(name, [], []).shape == (0,) for name in PER_GROUP)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_missing_reward_raises_an_error_with_its_index(reward: float) -> None:
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        shaped("reinforce", [0.0, reward], [0, 0])


# Credit over tokens


def test_gae_matches_a_worked_example() -> None:
    """With γ = ½ and λ = ½, the rewards are 0, 0, 8 and the values are 4, 2, 6.

    δ = 0 + ½·2 − 4, 0 + ½·6 − 2, 8 − 6 = −3, 1, 2.
    Â_3 = 2, Â_2 = 1 + ¼·2 = 1.5, Â_1 = −3 + ¼·1.5 = −2.625.
    """
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[4.0, 2.0, 6.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-2.625, 1.5, 2.0]]
    assert returns.tolist() == [[1.375, 3.5, 8.0]]


def test_gae_skips_tool_output() -> None:
    """The advantages equal those of `test_gae_matches_a_worked_example`.

    The row also contains a prompt, two tool tokens in the middle, and padding.
    """
    mask = torch.tensor([[False, True, False, False, True, True, False]])
    rewards = torch.tensor([[9.0, 0.0, 9.0, 9.0, 0.0, 8.0, 9.0]])
    values = torch.tensor([[7.0, 4.0, 7.0, 7.0, 2.0, 6.0, 7.0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, -2.625, 0.0, 0.0, 1.5, 2.0, 0.0]]
    assert returns.tolist() == [[0.0, 1.375, 0.0, 0.0, 3.5, 8.0, 0.0]]


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 0.7), (0.5, 1.0)]
)
def test_gae_matches_the_sum_in_the_paper(gamma: float, lam: float) -> None:
    rewards, values, mask = random_block()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        expected = credit.gae(
            rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam
        )
        assert advantages[row].tolist() == pytest.approx(expected[0])
        assert returns[row].tolist() == pytest.approx(expected[1])


steps = st.lists(st.tuples(quarters, quarters, st.booleans()), min_size=1, max_size=10)


@given(block=st.lists(steps, min_size=1, max_size=4), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_matches_the_reference_for_any_rows_and_masks(
    block: list[list[tuple[float, float, bool]]], gamma: float, lam: float
) -> None:
    """Rows have different lengths, and the values in their right padding must not be read."""
    width = max(map(len, block))
    padded = [row + [(99.0, -99.0, False)] * (width - len(row)) for row in block]
    rewards, values, mask = (
        torch.tensor([[step[i] for step in row] for row in padded]) for i in range(3)
    )
    advantages, returns = gae(rewards.double(), values.double(), mask.bool(), gamma=gamma, lam=lam)
    for row, steps in enumerate(padded):
        expected = credit.gae(*([step[i] for step in steps] for i in range(3)), gamma, lam)
        assert advantages[row].tolist() == pytest.approx(expected[0], abs=1e-9)
        assert returns[row].tolist() == pytest.approx(expected[1], abs=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_1_equals_return_minus_value(gamma: float) -> None:
    rewards, values, mask = random_block()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    sums, _ = monte_carlo(rewards, values, mask, gamma=gamma, lam=1.0)
    assert torch.allclose(advantages, (sums - values).masked_fill(~mask, 0))
    assert torch.allclose(returns, sums)


def test_gae_with_lambda_0_equals_the_td_residual() -> None:
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert gae(rewards, values, mask, gamma=1.0, lam=0.0)[0].tolist() == [[11.0, -18.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns_match_the_reference(gamma: float) -> None:
    rewards, values, mask = random_block()
    advantages, returns = monte_carlo(rewards, values, mask, gamma=gamma, lam=0.5)
    assert torch.equal(advantages, returns)
    for row in range(len(mask)):
        expected = credit.discounted_returns(rewards[row].tolist(), mask[row].tolist(), gamma)
        assert returns[row].tolist() == pytest.approx(expected)


def test_undiscounted_outcome_is_the_return_of_every_action() -> None:
    mask = torch.tensor([[False, True, True, False, True]])
    rewards = token_rewards(torch.tensor([0.7]), None, mask, 0.0)
    returns, _ = monte_carlo(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)
    assert torch.equal(returns, mask * torch.tensor(0.7))


def test_advantages_of_a_row_do_not_depend_on_padding_or_other_rows() -> None:
    rewards, values, mask = random_block()
    alone = gae(rewards[2:3], values[2:3], mask[2:3], gamma=0.9, lam=0.8)[0]
    pad = torch.nn.functional.pad
    left = gae(pad(rewards, (3, 0)), pad(values, (3, 0)), pad(mask, (3, 0)), gamma=0.9, lam=0.8)[0]
    assert torch.equal(left[2, 3:], alone[0])


def test_values_outside_the_mask_are_ignored() -> None:
    rewards, values, mask = random_block()
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    nan = float("nan")
    dirty = gae(
        rewards.masked_fill(~mask, nan), values.masked_fill(~mask, nan), mask, gamma=0.9, lam=0.8
    )
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (0, 0)])
def test_advantages_without_actions_are_zero(shape: tuple[int, int]) -> None:
    zeros, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    advantages, returns = gae(zeros, zeros, mask, gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == shape
    assert not advantages.any()


def test_credit_assignment_with_mismatched_shapes_raises_an_error() -> None:
    # The error comes from `gae`, or from the test run's type checks, which run earlier.
    with pytest.raises((ValueError, TypeError), match=r"\(2, 3\), \(2, 4\), \(2, 3\)|values"):
        gae(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3) > 0, gamma=1.0, lam=1.0)


# The whole path


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kl_coef", [0.0, 0.2], ids=["without KL", "with KL"])
@pytest.mark.parametrize("scale", [True, False], ids=["÷ std", "no std"])
def test_every_estimator_matches_the_reference_from_reward_to_advantage(
    name: str, kl_coef: float, scale: bool
) -> None:
    """The experience maker's steps are compared with the same steps in the reference loops."""
    estimator = ADVANTAGE_ESTIMATORS[name]
    kl, values, mask = random_block()
    rewards, groups = [0.1, 0.9, 0.4, 12.5, -30.0], [0, 0, 0, 1, 1]
    gamma, lam = (1.0, 1.0) if estimator.traits.per_episode else (0.9, 0.95)

    scores = clip_rewards(shaped(name, rewards, groups), -10.0, 10.0)
    per_token = token_rewards(scores, kl, mask, kl_coef)
    known = values if estimator.traits.needs_critic else torch.zeros_like(values)
    advantages, returns = estimator.credit(per_token, known, mask, gamma=gamma, lam=lam)
    advantages = normalize_advantages(advantages, mask, estimator, scale=scale)

    flat: list[float] = []
    for row, score in enumerate(credit.shaped(name, rewards, groups)):
        row_mask = mask[row].tolist()
        row_rewards = credit.token_rewards(
            min(max(score, -10.0), 10.0), kl[row].tolist(), row_mask, kl_coef
        )
        if name == "gae":
            row_advantages, row_returns = credit.gae(
                row_rewards, values[row].tolist(), row_mask, gamma, lam
            )
        else:
            row_returns = credit.discounted_returns(row_rewards, row_mask, gamma)
            row_advantages = row_returns
        flat += row_advantages
        assert returns[row].tolist() == pytest.approx(row_returns), "returns are never whitened"
    if name in ("gae", "reinforce", "reinforce_baseline"):
        flat = credit.whiten(flat, mask.flatten().tolist(), scale)
    assert advantages.flatten().tolist() == pytest.approx(flat)


@pytest.mark.parametrize("name", ALL)
def test_equal_rewards_give_exactly_zero_advantages(name: str) -> None:
    estimator = ADVANTAGE_ESTIMATORS[name]
    mask = torch.rand(8, 20, generator=torch.Generator().manual_seed(0)) < 0.7
    scores = shaped(name, [0.1] * 8, [0] * 8, torch.float32)
    block = token_rewards(scores, None, mask, 0.0)
    advantages, _ = estimator.credit(block, torch.zeros(8, 20), mask, gamma=1.0, lam=1.0)
    assert not normalize_advantages(advantages, mask, estimator).any()


@pytest.mark.parametrize(
    "shape",
    [
        lambda rewards, group: rewards[:-1],
        lambda rewards, group: torch.cat([rewards, rewards]),
        lambda rewards, group: rewards[:, None],
        lambda rewards, group: float(rewards.mean()),
        lambda rewards, group: rewards.long(),
        lambda rewards, group: rewards / 0,
        lambda rewards: rewards,
        lambda rewards, group: None,
    ],
    ids=["short", "long", "matrix", "number", "integers", "infinite", "arguments", "nothing"],
)
def test_reward_shaping_must_return_one_finite_number_per_sample(shape: Any) -> None:
    with pytest.raises(EstimatorError):
        shape_rewards(
            torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 0, 1]), AdvantageEstimator(shape)
        )
