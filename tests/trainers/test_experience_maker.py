"""Tests for the experience maker, which computes advantages from rewards.

Results are either computed by hand for small batches or compared with loops from the papers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from openrlhf.config.flags import amend
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.rollout import RewardConfig
from openrlhf.core.batches import Experience, TokenRows, offsets_of
from openrlhf.core.trajectory import Exclusion
from openrlhf.observability.metrics import values
from openrlhf.rewards.protocol import combined
from openrlhf.trainers import stages
from openrlhf.trainers.experience_maker import (
    ExperienceMaker,
    StepBatch,
    find_exclusions,
    group_metrics,
)
from openrlhf.trainers.filtering import thrown_away
from openrlhf.trainers.stages import ColumnStage, EarlyStages, EpisodeRows, RewardStage, Stage
from openrlhf.workers.critic import CriticWorker
from tests.reference import credit as reference
from tests.trainers.episodes import episode, failed

FLAGS = {
    "estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "scale_advantages": "algo.advantage.no_std_norm",
    "kl_in_reward": "algo.kl.use_loss",
    "distill_coef": "algo.distill.coef",
    "reward_clip": "reward.clip_range",
    "overlong_buffer": "reward.overlong_buffer_len",
    "overlong_factor": "reward.overlong_penalty_factor",
    "stop_properly": "reward.stop_properly_penalty_coef",
    "max_new_tokens": "rollout.max_new_tokens",
    "max_len": "data.max_len",
    "mask_truncated": "algo.loss.mask_truncated",
}
OPPOSITE = ("scale_advantages", "kl_in_reward")
BASE = {"estimator": "group_norm", "max_new_tokens": 4, "max_len": 6}


def maker_of(wanted: Any = (), *, kl_coef: float = 0.1, **changes: Any) -> ExperienceMaker:
    values = {FLAGS[n]: not v if n in OPPOSITE else v for n, v in (BASE | changes).items()}
    config = amend(PPOConfig(), {**values, "algo.kl.init_coef": kl_coef})
    return ExperienceMaker(config, wanted)


# There are two one-token prompts with two samples each; the samples have 2, 1, 1 and 3 tokens.
ACTIONS = [2, 1, 1, 3]
ROWS = [slice(0, 3), slice(3, 5), slice(5, 7), slice(7, 11)]
ROOT = math.sqrt(0.5)  # group-normalized rewards 1 and 0 are ±0.5 / √0.5


def batch(rewards: list[float], **changes: Any) -> Experience:
    offsets = offsets_of([1 + actions for actions in ACTIONS])
    mask = torch.ones(11, dtype=torch.bool)
    mask[offsets[:-1]] = False
    columns: dict[str, Any] = {
        "tokens": torch.zeros(11, dtype=torch.long),
        "offsets": offsets,
        "action_mask": mask,
        "rollout_logprobs": torch.zeros(11),
        "group_ids": torch.tensor([7, 7, 9, 9]),
        "rewards": torch.tensor(rewards),
        "truncated": torch.tensor([False, False, False, True]),
    }
    return Experience(**columns | changes)


def credited(
    experience: Experience, *, kl_coef: float = 0.1, **changes: Any
) -> tuple[Experience, dict[str, float]]:
    maker = maker_of(kl_coef=kl_coef, **changes)
    result, metrics = maker.credit(experience)
    return result, values(metrics)


def rows(column: torch.Tensor | None) -> list[list[float]]:
    """Return the sampled tokens of each row."""
    assert column is not None
    return [[round(x, 5) for x in column[row].tolist()[1:]] for row in ROWS]


def test_group_norm_with_kl_in_reward_matches_hand_computed_values() -> None:
    old, ref = torch.full((11,), -1.0), torch.full((11,), -1.0)
    ref[1:3] = -1.5  # the first sample's KL is 0.5 nats per token, with weight 0.1
    experience, metrics = credited(
        batch([1.0, 0.0, 2.0, 2.0], old_logprobs=old, ref_logprobs=ref), kl_coef=0.1
    )
    expected = [[-0.05, ROOT - 0.05], [-ROOT], [0.0], [0.0, 0.0, 0.0]]
    assert rows(experience.token_rewards) == [[round(x, 5) for x in row] for row in expected]
    expected = [[ROOT - 0.1, ROOT - 0.05], [-ROOT], [0.0], [0.0, 0.0, 0.0]]
    assert rows(experience.returns) == [[round(x, 5) for x in row] for row in expected]
    assert rows(experience.advantages) == rows(experience.returns)
    assert metrics["train/kl"] == pytest.approx(1.0 / 7)
    assert metrics["train/return"] == pytest.approx(-0.1 / 4, abs=1e-6)


def test_batch_metrics_match_hand_computed_values() -> None:
    _, metrics = credited(batch([1.0, 0.0, 2.0, 2.0]), kl_in_reward=False, max_len=4)
    assert metrics == pytest.approx(
        {
            "train/reward": 1.25,
            "train/return": 0.0,  # the shaped rewards of a group sum to zero
            "train/response_length": 7 / 4,
            "train/total_length": 11 / 4,
            "train/truncated": 0.25,
            "train/response_clip_ratio": 0.25,  # one of four rows fills --data.max_len
            "train/group_reward_std": ROOT / 2,
            "train/dead_groups": 0.5,
        },
        abs=1e-6,
    )


def test_gae_without_a_critic_is_rejected() -> None:
    with pytest.raises(AssertionError):
        credited(batch([1.0, 0.0, 2.0, 0.0]), estimator="gae", kl_in_reward=False)


def test_prompt_tokens_get_no_reward_and_no_advantage() -> None:
    experience, _ = credited(batch([1.0, 0.0, 2.0, 0.0]), kl_in_reward=False)
    for column in (experience.token_rewards, experience.advantages, experience.returns):
        assert column is not None
        assert not column[~experience.action_mask].any()


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "rloo", "dr_grpo"])
@pytest.mark.parametrize("scale", [True, False])
def test_other_estimators_match_loops_written_from_the_papers(name: str, scale: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    old, ref = torch.rand(11, generator=generator), torch.rand(11, generator=generator)
    rewards, gamma = [1.0, 0.25, -2.0, 2.0], 0.9 if name == "reinforce" else 1.0
    experience, _ = credited(
        batch(rewards, old_logprobs=old, ref_logprobs=ref),
        kl_coef=0.3,
        estimator=name,
        gamma=gamma,
        scale_advantages=scale,
    )
    mask = experience.action_mask.tolist()
    flat: list[float] = []
    shaped = reference.shaped(name, rewards, [7, 7, 9, 9])
    for row, reward in zip(ROWS, shaped, strict=True):
        kl = [float(x) for x in (old - ref)[row]]
        per_token = reference.token_rewards(reward, kl, mask[row], 0.3)
        flat += reference.discounted_returns(per_token, mask[row], gamma)
    assert experience.returns is not None and experience.advantages is not None
    torch.testing.assert_close(experience.returns, torch.tensor(flat), atol=1e-6, rtol=0)
    if name.startswith("reinforce"):
        flat = reference.whiten(flat, mask, scale)
    torch.testing.assert_close(experience.advantages, torch.tensor(flat), atol=1e-6, rtol=0)


def test_rewards_are_clipped_after_shaping() -> None:
    experience, metrics = credited(
        batch([100.0, 0.0, 2.0, 0.0]), kl_in_reward=False, reward_clip=(-0.5, 0.25)
    )
    assert rows(experience.token_rewards) == [[0.0, 0.25], [-0.5], [0.25], [0.0, 0.0, -0.5]]
    assert experience.rewards.tolist() == [100.0, 0.0, 2.0, 0.0]
    assert metrics["train/reward"] == 25.5


def test_length_penalties_count_sampled_tokens_and_apply_before_shaping() -> None:
    experience, metrics = credited(
        batch([1.0, 1.0, 1.0, 1.0]),
        kl_in_reward=False,
        estimator="reinforce",
        overlong_buffer=2.0,
        overlong_factor=0.5,
    )
    # With max_new_tokens 4 and buffer 2, three tokens exceed 4 − 2 by one, half of the buffer.
    assert experience.rewards.tolist() == [1.0, 1.0, 1.0, 0.75]
    assert metrics["train/reward"] == pytest.approx(3.75 / 4)


def test_length_limit_without_max_new_tokens_is_max_len_minus_prompt_length() -> None:
    experience, _ = credited(
        batch([1.0, 1.0, 1.0, 1.0]),
        kl_in_reward=False,
        estimator="reinforce",
        overlong_buffer=2.0,
        max_new_tokens=None,
        max_len=4,
    )
    # max_len 4 leaves 3 tokens after a 1-token prompt. Two tokens exceed 3 − 2 by 1, three by 2.
    assert experience.rewards.tolist() == [0.5, 1.0, 1.0, 0.0]


def test_truncated_samples_are_penalized_for_not_stopping() -> None:
    experience, _ = credited(
        batch([1.0, 1.0, 1.0, 1.0]), kl_in_reward=False, estimator="reinforce", stop_properly=0.25
    )
    assert experience.rewards.tolist() == [1.0, 1.0, 1.0, 0.25]


def test_missing_reward_raises_an_error_instead_of_becoming_zero() -> None:
    with pytest.raises(ValueError, match=r"rewards must be finite.*\[2\]"):
        credited(batch([1.0, 0.0, math.nan, 0.0]), kl_in_reward=False)


def test_reward_spread_is_averaged_over_prompts() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0, 5.0, 5.0, 9.0])
    # The groups have a std of √0.5, a std of 0, and a single sample.
    groups = torch.tensor([4, 4, 2, 2, 2, 8])
    metrics = values(group_metrics(rewards, groups))
    assert metrics == pytest.approx({"train/group_reward_std": ROOT / 2, "train/dead_groups": 0.5})


def test_prompts_with_one_sample_have_no_reward_spread() -> None:
    assert group_metrics(torch.tensor([0.0, 1.0]), torch.tensor([1, 2])) == {}


def test_teacher_advantage_of_each_token_uses_only_its_own_log_ratio() -> None:
    old, teacher = torch.full((11,), -1.0), torch.full((11,), -1.0)
    # One token is more likely, one is less likely, and one has a KL that is clipped to 10 nats.
    teacher[1], teacher[2], teacher[4] = -0.5, -3.0, -500.0
    columns = {"old_logprobs": old, "teacher_logprobs": teacher}
    experience, metrics = credited(
        batch([0.0, 0.0, 0.0, 0.0], **columns), kl_in_reward=False, distill_coef=2.0
    )
    assert rows(experience.advantages) == [[1.0, -4.0], [-20.0], [0.0], [0.0, 0.0, 0.0]]
    assert rows(experience.token_rewards) == [[0.0, 0.0], [0.0], [0.0], [0.0, 0.0, 0.0]]
    assert metrics["train/teacher_kl"] == pytest.approx((-0.5 + 2.0 + 10.0) / 7)


@pytest.mark.parametrize(
    ("rule", "by_models", "weights", "reward", "score", "logged"),
    [
        (0.5, [], [], 0.5, 0.25, {}),
        (0.5, [], [3.0], 1.5, 0.25, {}),
        (None, [2.0], [], 2.0, 2.0, {}),
        (None, [2.0], [0.5], 1.0, 1.0, {}),
        (None, [2.0], [0.5, 3.0], 1.0, 1.0, {}),
        (None, [2.0, -1.0], [], 1.0, 1.0, {"reward_model_1": 2.0, "reward_model_2": -1.0}),
        (
            1.0,
            [2.0, -1.0],
            [],
            2.0,
            0.25,
            {"reward_model_1": 2.0, "reward_model_2": -1.0, "reward_rule": 1.0},
        ),
        (1.0, [2.0], [1.0, 0.0], 2.0, 0.25, {"reward_model_1": 2.0, "reward_rule": 1.0}),
    ],
)
def test_model_and_function_rewards_are_summed_and_the_functions_score_is_kept(
    rule: float | None,
    by_models: list[float],
    weights: list[float],
    reward: float,
    score: float,
    logged: dict[str, float],
) -> None:
    came = episode(reward=rule, score=None if rule is None else 0.25, extra_logs={"own": 7.0})
    result = combined(came, by_models, weights)
    assert (result.reward, result.score) == (reward, score)
    assert result.extra_logs == {"own": 7.0, **logged}


def test_turn_rewards_are_weighted_and_used_unless_samples_are_compared() -> None:
    came = combined(
        episode(reward=3.0, score=3.0, actions=3, turn_rewards=((1, 2.0), (3, 1.0))),
        [10.0],
        [1.0, 0.5],
    )
    assert came.turn_rewards == ((1, 1.0), (3, 0.5))
    experience = Experience.from_trajectories([came, episode(sample=1, reward=1.0)])
    alone, _ = credited(experience, estimator="reinforce", kl_in_reward=False)
    # The sum of an episode's rewards is clipped to 10.
    assert rows_of(alone.token_rewards, [4, 2]) == [[0.0, 1.0, 0.0, 9.0], [0.0, 1.0]]
    compared, _ = credited(experience, estimator="rloo", kl_in_reward=False)
    assert rows_of(compared.token_rewards, [4, 2]) == [[0.0, 0.0, 0.0, 10.0], [0.0, -10.0]]


def rows_of(column: torch.Tensor | None, lengths: list[int]) -> list[list[float]]:
    assert column is not None
    return [row.tolist() for row in column.split(lengths)]


@pytest.mark.parametrize("by_model", [math.nan, math.inf, 1e39])
def test_reward_that_float32_cannot_represent_fails_the_episode(by_model: float) -> None:
    result = combined(episode(score=0.5), [by_model], [])
    assert (result.failed, result.reward, result.score) == (True, None, None)
    assert str(by_model) in str(result.error)


# ---- stages, with hand-written workers


@pytest.fixture(autouse=True)
def _answers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "wait_for", lambda calls, **_: calls)


class Workers:
    """A worker group that responds immediately and records which columns it received."""

    role = "role"
    attention_length = None

    def __init__(self, answer: Callable[[Any], torch.Tensor], *, slices: int = 1) -> None:
        self.answer = answer
        self.slices = slices

    def launch(self, _: object, parts: list[Any]) -> list[torch.Tensor]:
        SENT.append({f.name for f in fields(parts[0])})
        return [self.answer(part) for part in parts]


def row_lengths(rows: Any) -> torch.Tensor:
    """Return each token's row length, or 0 for tokens that a loss mask excludes."""
    column = rows.lengths.repeat_interleave(rows.lengths).float()
    return column * rows.loss_mask if isinstance(rows, TokenRows) else column


def column_stage(name: str, **changes: Any) -> ColumnStage:
    by: Any = Workers(row_lengths, slices=2)
    method: Any = None
    return ColumnStage(writes=name, by=by, method=method, **changes)


def judges(broken: tuple[int, ...] = (), *, models: bool = True, **flags: Any) -> RewardStage:
    """Return a stage with two reward models: one returns 1, and the other returns the row number.

    The rewards of rows listed in `broken` are NaN.
    """

    def answer(rows: Any) -> torch.Tensor:
        numbers = torch.arange(rows.num_rows).float()
        numbers[list(broken)] = torch.nan
        return torch.stack([torch.ones(len(numbers)), numbers], 1)

    names = "one,two" if models else None
    workers: Any = Workers(answer) if models else None
    return RewardStage(by=workers, reward=RewardConfig(model_name_or_path=names, **flags))


SENT: list[set[str]] = []
WEIGHTS = (0.5, 2.0, 1.0)


def annotated(
    trajectories: list[Any], *, broken: tuple[int, ...] | None = None, needs_groups: bool = True
) -> StepBatch:
    wanted: list[Stage] = [
        column_stage("old_logprobs"),
        column_stage("values", inputs=Experience.texts),
    ]
    if broken is not None:
        wanted = [judges(broken, weights=WEIGHTS), *wanted]
    return maker_of(wanted, estimator="group_norm" if needs_groups else "reinforce").annotate(
        trajectories
    )


def test_stage_is_sent_only_the_columns_that_it_reads() -> None:
    SENT.clear()
    batch = annotated([episode(0, 0, score=1.0), episode(0, 1, score=0.0, actions=2)])
    assert [{"tokens", "offsets", "loss_mask"}, {"tokens", "offsets"}] == SENT
    assert batch.experience.old_logprobs is not None and batch.experience.values is not None
    assert batch.experience.old_logprobs.tolist() == [0, 2, 0, 3, 3]
    assert batch.experience.values.tolist() == [2, 2, 3, 3, 3]
    assert set(batch.timing) == {"timing/old_logprobs", "timing/values"}


def test_early_stages_leave_failed_episodes_unchanged_and_in_place() -> None:
    group = [episode(0, 0, score=1.0), failed(0, 1), episode(0, 2, score=0.0, actions=0)]
    lengths = column_stage("values", inputs=Experience.texts)
    early = EarlyStages(stages=[judges(weights=WEIGHTS), lengths], timeout_s=1.0)
    first, untouched, last = asyncio.run(early.score_group(group))
    assert untouched is group[1]
    assert (first.reward, last.reward) == (0.5 + 0.0 + 1.0, 0.5 + 2.0)
    for trajectory in (first, last):
        length = len(trajectory.tokens)
        assert trajectory.columns["values"].tolist() == [float(length)] * length
    rule = EarlyStages(stages=[judges(models=False)], timeout_s=1.0)
    assert [t.reward for t in rule.score(group)] == [1.0, None, 0.0]


def test_stage_with_only_function_rewards_does_not_convert_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = [episode(0, 0, score=4.0), episode(0, 1, score=6.0)]
    rule = EarlyStages(stages=[judges(models=False, weights=(0.25,))], timeout_s=1.0)
    monkeypatch.setattr(Experience, "from_trajectories", None)
    assert [trajectory.reward for trajectory in rule.score(group)] == [1.0, 1.5]


def test_column_present_in_every_episode_is_not_recomputed() -> None:
    SENT.clear()
    group = [episode(0, 0, score=1.0), episode(0, 1, score=0.0, actions=2)]
    early = EarlyStages(stages=[column_stage("old_logprobs")], timeout_s=1.0)
    once = annotated(early.score(group))
    assert [{"tokens", "offsets", "loss_mask"}, {"tokens", "offsets"}] == SENT
    assert set(once.timing) == {"timing/values"}
    assert once.experience.old_logprobs is not None
    assert once.experience.old_logprobs.tolist() == [0, 2, 0, 3, 3]


def test_update_is_sent_only_the_columns_that_its_role_reads() -> None:
    batch = annotated([episode(0, 0, score=1.0), episode(0, 1, score=0.0)])
    sent = batch.experience.only(*CriticWorker.update_columns)
    assert sent.values is not None
    assert (sent.old_logprobs, sent.rollout_logprobs) == (None, None)


def test_model_rewards_are_added_together_with_the_other_columns() -> None:
    came = [
        episode(0, 0, score=4.0),
        episode(0, 1, score=6.0, turn_rewards=((1, 6.0),)),
        failed(0, 2),
    ]
    batch = annotated(came, broken=())
    # The rewards are 0.5 · 1 + 2 · row + 1 · the function's reward.
    assert batch.experience.rewards.tolist() == [4.5, 8.5]
    assert [t.reward for t in batch.trajectories] == [4.5, 8.5, None]
    assert batch.exclusions == [None, None, Exclusion.FAILED]
    assert batch.experience.turn_rewards is not None
    assert batch.experience.turn_rewards.tolist() == [0, 0, 0, 6.0]
    assert "timing/reward_models" in batch.timing


def test_function_reward_alone_is_weighted_and_unrewarded_episodes_get_zero() -> None:
    came = [
        episode(0, 0, score=4.0),
        replace(episode(0, 1, score=6.0), reward=None, score=None),
        failed(0, 2),
    ]
    batch = maker_of([judges(models=False, weights=(0.25,))]).annotate(came)
    assert batch.experience.rewards.tolist() == [1.0, 0.0]
    assert [t.score for t in batch.trajectories[:2]] == [4.0, 0.0]
    assert batch.exclusions == [None, None, Exclusion.FAILED]
    assert not batch.timing


def test_sample_with_nonfinite_reward_fails_and_its_row_is_dropped() -> None:
    came = [
        episode(0, 0, score=1.0),
        episode(0, 1, score=1.0),
        episode(1, 0, score=1.0, actions=3),
        episode(1, 1, score=1.0),
    ]
    batch = annotated(came, broken=(0,))
    assert [t.failed for t in batch.trajectories] == [True, False, False, False]
    assert batch.exclusions == [Exclusion.FAILED, Exclusion.ALONE, None, None]
    assert batch.experience.lengths.tolist() == [4, 2]
    assert batch.experience.old_logprobs is not None
    assert batch.experience.old_logprobs.tolist() == [0, 4, 4, 4, 0, 2]


def test_no_worker_is_called_if_all_episodes_failed() -> None:
    SENT.clear()
    batch = annotated([failed(0, 0), failed(0, 1)], broken=())
    assert (batch.experience.num_rows, SENT) == (0, [])
    assert batch.exclusions == [Exclusion.FAILED] * 2
    assert len(batch.trajectories) == 2


# ---- which episodes are trained on


def kept(trajectories: list[Any], *, needs_groups: bool) -> list[Any]:
    exclusions = find_exclusions(trajectories, needs_groups=needs_groups)
    pairs = zip(trajectories, exclusions, strict=True)
    return [trajectory for trajectory, exclusion in pairs if exclusion is None]


def test_failed_episodes_are_not_trained_on() -> None:
    good = episode(0, 0, score=1.0)
    assert kept([good, failed(0, 1)], needs_groups=False) == [good]


def test_episodes_without_a_sampled_token_are_not_trained_on() -> None:
    good = episode(0, 0, score=1.0)
    assert kept([good, episode(0, 1, score=0.0, actions=0)], needs_groups=False) == [good]


def test_sample_alone_in_its_group_is_dropped_if_samples_are_compared() -> None:
    pair = [episode(0, 0, score=1.0), episode(0, 1, score=0.0)]
    lone = [episode(1, 0, score=1.0), failed(1, 1)]
    assert kept([*pair, *lone], needs_groups=True) == pair
    assert kept([*pair, *lone], needs_groups=False) == [*pair, lone[0]]


def test_filtered_episodes_are_not_trained_on() -> None:
    pair = [episode(0, 0, score=1.0), episode(0, 1, score=0.0)]
    filtered = [thrown_away(episode(1, sample, score=1.0)) for sample in range(2)]
    assert kept([*pair, *filtered], needs_groups=True) == pair


@pytest.mark.parametrize(
    "estimator", ["group_norm", "rloo", "reinforce_baseline", "dr_grpo", "reinforce"]
)
@pytest.mark.parametrize("truncated", [[], [3], [0, 2], [0, 1, 2, 3]])
def test_masked_truncated_samples_still_count_in_baselines_and_metrics(
    estimator: str, truncated: list[int]
) -> None:
    cut = torch.tensor([row in truncated for row in range(4)])
    whole, metrics = credited(batch([1.0, 0.0, 2.0, 1.0], truncated=cut), estimator=estimator)
    left, same = credited(
        batch([1.0, 0.0, 2.0, 1.0], truncated=cut), estimator=estimator, mask_truncated=True
    )
    expected = whole.select([row for row in range(4) if row not in truncated])
    assert left.num_rows == 4 - len(truncated)
    for column in ("tokens", "offsets", "action_mask", "advantages", "returns", "group_ids"):
        assert torch.equal(getattr(left, column), getattr(expected, column))
    assert metrics == same and metrics["train/truncated"] == len(truncated) / 4


# ---- episodes with several conversations


def split_first(experience: Experience) -> Experience:
    """Return the batch with an earlier conversation added to its first episode.

    The added conversation has two sampled tokens.
    """
    twice = experience.select([0, 0, 1, 2, 3])
    return replace(twice, trajectory_ids=torch.tensor([0, 0, 1, 2, 3]))


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "reinforce_baseline"])
def test_episode_with_several_conversations_counts_once_in_the_baseline(
    estimator: str,
) -> None:
    whole = batch([1.0, 0.0, 2.0, 0.5])
    once, metrics = credited(whole, estimator=estimator, kl_in_reward=False, scale_advantages=False)
    twice, more = credited(
        split_first(whole), estimator=estimator, kl_in_reward=False, scale_advantages=False
    )
    assert once.token_rewards is not None and twice.token_rewards is not None
    same = replace(once, offsets=once.offsets).select([0, 0, 1, 2, 3])
    assert torch.equal(twice.token_rewards, same.token_rewards)
    assert more["train/reward"] == metrics["train/reward"]
    assert more["train/group_reward_std"] == metrics["train/group_reward_std"]
    assert more["train/truncated"] == metrics["train/truncated"]
    assert more["train/response_length"] == metrics["train/response_length"] + 2 / 4


def test_length_penalty_of_an_episode_is_that_of_its_longest_conversation() -> None:
    whole = split_first(batch([1.0, 0.0, 2.0, 0.5]))
    rows = whole.select([4, 0, 2, 3, 1])
    mixed = replace(
        rows, trajectory_ids=torch.tensor([0, 0, 1, 2, 3]), group_ids=torch.tensor([7, 7, 7, 9, 9])
    )
    mixed = replace(
        mixed,
        rewards=torch.tensor([1.0, 1.0, 0.0, 2.0, 0.5]),
        truncated=torch.zeros(5, dtype=torch.bool),
    )
    experience, _ = credited(mixed, overlong_buffer=2.0, overlong_factor=1.0, kl_in_reward=False)
    assert experience.rewards[0] == experience.rewards[1] == 0.5


def test_early_stage_column_is_split_over_the_conversations() -> None:
    earlier = episode(score=1.0)
    whole = replace(episode(score=1.0), earlier=(earlier,))
    count = len(earlier.tokens)
    column = torch.tensor([0.5] * count + [0.25] * count)
    annotation = EpisodeRows([whole]).with_column("old_logprobs", column)
    [done] = annotation.episodes_with(["old_logprobs"])
    experience = Experience.from_trajectories([done])
    assert experience.old_logprobs is not None
    assert experience.old_logprobs.tolist() == [0.5] * count + [0.25] * count
