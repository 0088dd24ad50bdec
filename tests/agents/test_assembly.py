"""Tests that assemble episodes from token ids.

Action masks cover exactly the sampled tokens, and each token keeps its log-probability.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.assembly import EpisodeMistake, assemble
from openrlhf.core.trajectory import Failure
from openrlhf.isolation.call import Asked, UserCodeError
from openrlhf.rollout.sampling import Generation

TOKEN = st.integers(0, 3)  # only a few distinct tokens, so that turns look alike
# A turn: sampled tokens, followed by the environment's tokens.
TURN = st.tuples(st.lists(TOKEN, max_size=4), st.lists(TOKEN, max_size=4))


def call(prompt: list[int], tokens: list[int], *, version: int = 0, start: float = 0.0) -> Asked:
    """Return a request whose sample has the log-probabilities −start, −start − 1, …

    No two log-probabilities of an episode are equal.
    """
    generation = Generation(
        tokens=tokens,
        logprobs=[-start - i for i in range(len(tokens))],
        finish_reason="stop",
        stop_reason=None,
        weight_versions=(version,),
    )
    return Asked({"prompt": array("i", prompt).tobytes()}, generation, own=True)


def played(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> tuple[dict[str, Any], list[Asked]]:
    """Return the result of an executor for the given turns, and its requests to the engine."""
    tokens = list(prompt)
    ranges: list[list[int]] = []
    calls: list[Asked] = []
    for number, (sampled, feedback) in enumerate(turns):
        calls.append(call(list(tokens), sampled, version=number, start=100.0 * (number + 1)))
        ranges.append([len(tokens), len(tokens) + len(sampled)])
        tokens += [*sampled, *feedback]
    result = {
        "observation_tokens": tokens,
        "action_ranges": ranges,
        "rollout_log_probs": None,
        "reward": 1.0,
    }
    return result, calls


@given(st.lists(TOKEN, min_size=1, max_size=4), st.lists(TURN, min_size=1, max_size=5))
def test_episode_gets_masks_logprobs_and_weight_versions_from_its_samples(
    prompt: list[int], turns: list[Any]
) -> None:
    result, calls = played(prompt, turns)
    builder = assemble(result, calls, 1000, vocabulary=1000).builder
    expected_mask = [False] * len(prompt)
    expected_logprobs = [0.0] * len(prompt)
    for each, (sampled, feedback) in zip(calls, turns, strict=True):
        expected_mask += [True] * len(sampled) + [False] * len(feedback)
        expected_logprobs += [*each.answer.logprobs, *[0.0] * len(feedback)]
    assert builder.tokens == result["observation_tokens"]
    assert builder.action_mask == expected_mask
    assert builder.rollout_logprobs == expected_logprobs
    assert builder.weight_versions == [
        number for number, (sampled, _) in enumerate(turns) if sampled
    ]


@given(st.lists(TURN, min_size=1, max_size=5), st.integers(1, 30))
def test_episode_longer_than_the_context_is_cut_and_truncated_if_an_action_does_not_fit(
    turns: list[Any], length: int
) -> None:
    result, calls = played([0], turns)
    whole = assemble(result, calls, 1000, vocabulary=1000).builder
    cut = assemble(result, calls, length, vocabulary=1000)
    assert cut.builder.tokens == whole.tokens[:length]
    assert cut.builder.action_mask == whole.action_mask[:length]
    assert cut.builder.rollout_logprobs == whole.rollout_logprobs[:length]
    _, end_of_actions = result["action_ranges"][-1]
    assert cut.truncated == (end_of_actions > length)


def test_action_range_can_span_several_samples_and_end_inside_one() -> None:
    calls = [call([7], [1, 2], start=1), call([7, 1, 2], [3, 3, 3], start=10)]
    result = {"observation_tokens": [7, 1, 2, 3, 3, 9], "action_ranges": [[1, 5]], "reward": 0}
    assembled = assemble(result, calls, 100, vocabulary=1000)
    assert assembled.builder.rollout_logprobs == [0, -1, -2, -10, -11, 0]
    assert not assembled.notices


def test_samples_discarded_by_the_executor_are_skipped() -> None:
    calls = [call([7], [1], start=1), call([7], [1], start=10), call([7, 1, 8], [1], start=20)]
    result = {"observation_tokens": [7, 1, 8, 1], "action_ranges": [[1, 2], [3, 4]], "reward": 0}
    assert assemble(result, calls, 100, vocabulary=1000).builder.rollout_logprobs == [0, -1, 0, -20]


def test_action_sampled_from_a_different_prompt_adds_a_notice() -> None:
    result = {"observation_tokens": [7, 8, 1], "action_ranges": [[2, 3]], "reward": 0}
    assembled = assemble(result, [call([7, 7], [1], start=1)], 100, vocabulary=1000)
    assert list(assembled.notices) == ["other context"]


def test_tokens_not_sampled_by_the_engine_require_logprobs_from_the_executor() -> None:
    result = {
        "observation_tokens": [7, 1, 2],
        "action_ranges": [[1, 3]],
        "rollout_log_probs": [0, -0.5, -0.25],
        "reward": 0,
    }
    assembled = assemble(result, [], 100, vocabulary=1000)
    assert assembled.builder.rollout_logprobs == [0, -0.5, -0.25]
    assert list(assembled.notices) == ["not sampled"]
    with pytest.raises(EpisodeMistake, match=r"tokens 1 to 2\b.*rollout_log_probs"):
        assemble({**result, "rollout_log_probs": None}, [], 100, vocabulary=1000)


def test_sample_from_an_unknown_episode_is_used_only_if_its_prompt_matches() -> None:
    result = {"observation_tokens": [7, 8, 1], "action_ranges": [[2, 3]], "reward": 0}
    exact = replace(call([7, 8], [1], start=1), own=False)
    elsewhere = replace(call([7, 7], [1], start=10), own=False)
    builder = assemble(result, [elsewhere, exact], 100, vocabulary=1000).builder
    assert builder.rollout_logprobs == [0, 0, -1]
    with pytest.raises(EpisodeMistake, match="tokens 2 to 2"):
        assemble(result, [elsewhere], 100, vocabulary=1000)
    own = call([7, 8], [1], start=20)
    builder = assemble(result, [elsewhere, exact, own], 100, vocabulary=1000).builder
    assert builder.rollout_logprobs == [0, 0, -20]


def test_longest_matching_sample_is_used() -> None:
    short = call([9], [5], version=1, start=1)
    long = call([9], [5, 6, 1], version=2, start=10)
    result = {"observation_tokens": [9, 5, 6, 1], "action_ranges": [[1, 4]], "reward": 1.0}
    builder = assemble(result, [short, long], 100, vocabulary=1000).builder
    assert (builder.rollout_logprobs, builder.weight_versions) == ([0, -10, -11, -12], [2])


def test_token_outside_the_vocabulary_is_accepted_only_if_sampled_by_the_engine() -> None:
    result = {"observation_tokens": [7, 60], "action_ranges": [[1, 2]], "reward": 1.0}
    assert assemble(result, [call([7], [60])], 100, vocabulary=50).builder.tokens == [7, 60]
    with pytest.raises(EpisodeMistake, match=r"observation_tokens.*\[60\].* 49"):
        assemble(result | {"rollout_log_probs": [0.0, -1.0]}, [], 100, vocabulary=50)


def test_turn_rewards_are_placed_at_the_last_token_of_each_turn() -> None:
    result, calls = played([9], [([1, 2], [3]), ([1], []), ([], [5])])
    assembled = assemble(
        {**result, "reward": None, "turn_rewards": [0.5, 1, 0]}, calls, 100, vocabulary=1000
    )
    assert assembled.turn_rewards == ((2, 0.5), (4, 1.0))
    assert assembled.reward.reward == 1.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation_tokens": None}, "observation_tokens.* None"),
        ({"observation_tokens": [1, 2.5, 3]}, r"observation_tokens.* \[1, 2\.5, 3\]"),
        ({"observation_tokens": [7, 1, 2**70]}, f"{2**70}.* 999"),
        ({"action_ranges": [[0, 3]]}, r"action_ranges.* token 0.* \[\[0, 3\]\]"),
        ({"action_ranges": [[2, 1]]}, r"action_ranges.* 3 tokens.* \[\[2, 1\]\]"),
        ({"action_ranges": [[1, 4]]}, r"action_ranges.* 3 tokens.* \[\[1, 4\]\]"),
        ({"action_ranges": [[1, 3], [2, 3]]}, r"action_ranges.* 3 tokens"),
        ({"action_ranges": [2, 3]}, r"action_ranges.* \[2, 3\]"),
        ({"action_ranges": []}, r"action_ranges.* \[\]"),
        ({"rollout_log_probs": [0.0]}, r"1 rollout_log_probs.* 3 tokens.* \[0\.0\]"),
        ({"rollout_log_probs": [0.0, 0.0, float("nan")]}, "rollout_log_probs.* nan"),
        ({"reward": [1.0, 2.0]}, r"2 rewards.* \[1\.0, 2\.0\]"),
        ({"reward": "good"}, "rewards.* 'good'"),
        ({"reward": 10**400}, "too large"),
        ({"extra_logs": {"steps": 10**400}}, "too large"),
        ({"extra_logs": {"steps": "three"}}, "steps.* 'three'"),
        ({"extra_logs": [1]}, r"extra_logs.* \[1\]"),
        ({"turn_rewards": [10**400]}, "too large"),
        ({"turn_rewards": ["1.0"]}, "turn_rewards.*'1.0'"),
        ({"turn_rewards": [1.0, 2.0]}, "2 turn_rewards.* 1 action ranges"),
        ({"scores": float("inf")}, r"scores.*\binf\b"),
    ],
)
def test_invalid_result_raises_an_error_that_shows_the_value(
    changes: dict[str, Any], words: str
) -> None:
    result = {
        "observation_tokens": [7, 1, 2],
        "action_ranges": [[1, 3]],
        "rollout_log_probs": None,
        "reward": 0.0,
    }
    with pytest.raises(EpisodeMistake, match=words):
        assemble({**result, **changes}, [call([7], [1, 2])], 100, vocabulary=1000)


@pytest.mark.parametrize("own", [True, False])
def test_unfinished_sample_fails_the_episode_that_uses_it(
    own: bool,
) -> None:
    """The log-probabilities of an unfinished sample are all zero and must not be trained on.

    The episode fails even if the request might belong to another episode.
    """
    result, [sample] = played([7], [([1, 2], [])])
    broken = replace(
        sample, own=own, answer=replace(sample.answer, finish_reason="engine 0 gave NaN")
    )
    with pytest.raises(UserCodeError, match="engine 0 gave NaN") as error:
        assemble(result, [broken], 100, vocabulary=1000)
    assert error.value.failure is Failure.ENGINE
    unused = replace(broken, question={"prompt": b""})
    assert assemble(result, [sample, unused], 100, vocabulary=1000)


def test_earlier_conversations_are_assembled_from_the_samples_of_the_episode() -> None:
    result, calls = played([0, 1], [([2, 3], [0])])
    last, more = played([0, 2], [([2, 3], []), ([1], [])])
    versions = [replace(each, answer=replace(each.answer, weight_versions=(7,))) for each in more]
    assembled = assemble({**last, "earlier": [result]}, [*calls, *versions], 1000, vocabulary=1000)
    [earlier] = assembled.earlier
    assert earlier.tokens == [0, 1, 2, 3, 0]
    assert earlier.rollout_logprobs[2:4] == calls[0].answer.logprobs
    assert earlier.weight_versions == [0]
    assert assembled.builder.tokens == last["observation_tokens"]
    assert assembled.builder.weight_versions == [0, 7]
    assert assembled.turns == 3


@pytest.mark.parametrize(
    "earlier", [5, [5], [{}], [{"observation_tokens": [1], "action_ranges": [[0, 1]]}]]
)
def test_malformed_earlier_conversations_are_rejected(earlier: Any) -> None:
    result, calls = played([0], [([1], [])])
    with pytest.raises(EpisodeMistake):
        assemble({**result, "earlier": earlier}, calls, 1000, vocabulary=1000)
