"""Episodes are put together from token ids: masks cover exactly what the engine sampled, and each
token keeps its log-probability.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.assembly import EpisodeMistake, assemble
from openrlhf.core.trajectory import Failure
from openrlhf.isolation.call import Asked, UserCodeError
from openrlhf.rollout.sampling import Generation

TOKEN = st.integers(0, 3)  # few, so that one turn looks like another
TURN = st.tuples(
    st.lists(TOKEN, max_size=4), st.lists(TOKEN, max_size=4)
)  # sampled, then the environment's


def call(prompt: list[int], tokens: list[int], *, version: int = 0, start: float = 0.0) -> Asked:
    """A sample whose log-probabilities are −start, −start − 1, …: no two of an episode are the
    same.
    """
    generation = Generation(
        tokens=tokens,
        logprobs=[-start - i for i in range(len(tokens))],
        finish_reason="stop",
        stop_reason=None,
        weight_versions=(version,),
    )
    return Asked({"prompt": prompt}, generation, own=True)


def played(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> tuple[dict[str, Any], list[Asked]]:
    """What an executor returns for these turns, and the calls that it made."""
    tokens, ranges, calls = list(prompt), [], []
    for number, (sampled, feedback) in enumerate(turns):
        calls.append(call(list(tokens), sampled, version=number, start=100.0 * (number + 1)))
        ranges.append([len(tokens), len(tokens) + len(sampled)])
        tokens += [*sampled, *feedback]
    return {
        "observation_tokens": tokens,
        "action_ranges": ranges,
        "rollout_log_probs": None,
        "reward": 1.0,
    }, calls


@given(st.lists(TOKEN, min_size=1, max_size=4), st.lists(TURN, min_size=1, max_size=5))
def test_masks_logprobs_and_versions_are_those_of_the_calls(
    prompt: list[int], turns: list[Any]
) -> None:
    result, calls = played(prompt, turns)
    builder = assemble(result, calls, 1000, vocabulary=1000).builder
    expected_mask, expected_logprobs = [False] * len(prompt), [0.0] * len(prompt)
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
def test_an_episode_longer_than_the_context_is_cut_and_truncated(
    turns: list[Any], length: int
) -> None:
    result, calls = played([0], turns)
    whole, cut = (
        assemble(result, calls, 1000, vocabulary=1000).builder,
        assemble(result, calls, length, vocabulary=1000),
    )
    assert cut.builder.tokens == whole.tokens[:length]
    assert cut.builder.action_mask == whole.action_mask[:length]
    assert cut.builder.rollout_logprobs == whole.rollout_logprobs[:length]
    assert cut.truncated == (len(whole.tokens) > length)


def test_one_range_may_hold_several_samples_and_the_beginning_of_one() -> None:
    calls = [call([7], [1, 2], start=1), call([7, 1, 2], [3, 3, 3], start=10)]
    result = {"observation_tokens": [7, 1, 2, 3, 3, 9], "action_ranges": [[1, 5]], "reward": 0}
    assembled = assemble(result, calls, 100, vocabulary=1000)
    assert assembled.builder.rollout_logprobs == [0, -1, -2, -10, -11, 0]
    assert not assembled.oddities


def test_samples_that_the_executor_threw_away_do_not_get_in_the_way() -> None:
    calls = [call([7], [1], start=1), call([7], [1], start=10), call([7, 1, 8], [1], start=20)]
    result = {"observation_tokens": [7, 1, 8, 1], "action_ranges": [[1, 2], [3, 4]], "reward": 0}
    assert assemble(result, calls, 100, vocabulary=1000).builder.rollout_logprobs == [0, -1, 0, -20]


def test_an_action_after_other_tokens_than_the_engine_saw_is_told_of() -> None:
    result = {"observation_tokens": [7, 8, 1], "action_ranges": [[2, 3]], "reward": 0}
    assembled = assemble(result, [call([7, 7], [1], start=1)], 100, vocabulary=1000)
    assert assembled.oddities == [
        "shows the engine other tokens than those before the action in observation_tokens"
    ]


def test_tokens_from_elsewhere_count_with_their_own_logprobs_or_not_at_all() -> None:
    result = {
        "observation_tokens": [7, 1, 2],
        "action_ranges": [[1, 3]],
        "rollout_log_probs": [0, -0.5, -0.25],
        "reward": 0,
    }
    assembled = assemble(result, [], 100, vocabulary=1000)
    assert assembled.builder.rollout_logprobs == [0, -0.5, -0.25]
    assert assembled.oddities == ["has action_ranges with tokens that the engine did not sample"]
    with pytest.raises(EpisodeMistake, match="tokens 1 to 2, which the engine did not sample"):
        assemble({**result, "rollout_log_probs": None}, [], 100, vocabulary=1000)


def test_a_sample_of_an_unknown_episode_counts_if_it_continued_exactly_these_tokens() -> None:
    result = {"observation_tokens": [7, 8, 1], "action_ranges": [[2, 3]], "reward": 0}
    exact, elsewhere = call([7, 8], [1], start=1), call([7, 7], [1], start=10)
    samples = [replace(elsewhere, own=False), replace(exact, own=False)]
    assert assemble(result, samples, 100, vocabulary=1000).builder.rollout_logprobs == [0, 0, -1]
    with pytest.raises(EpisodeMistake, match="which the engine did not sample"):
        assemble(result, samples[:1], 100, vocabulary=1000)
    own = call([7, 8], [1], start=20)
    assert assemble(result, [*samples, own], 100, vocabulary=1000).builder.rollout_logprobs == [
        0,
        0,
        -20,
    ]


def test_of_samples_that_begin_alike_the_one_that_was_used_counts() -> None:
    short, long = call([9], [5], version=1, start=1), call([9], [5, 6, 1], version=2, start=10)
    result = {"observation_tokens": [9, 5, 6, 1], "action_ranges": [[1, 4]], "reward": 1.0}
    builder = assemble(result, [short, long], 100, vocabulary=1000).builder
    assert (builder.rollout_logprobs, builder.weight_versions) == ([0, -10, -11, -12], [2])


def test_a_token_that_no_tokenizer_knows_may_be_sampled_and_not_made_up() -> None:
    result = {"observation_tokens": [7, 60], "action_ranges": [[1, 2]], "reward": 1.0}
    assert assemble(result, [call([7], [60])], 100, vocabulary=50).builder.tokens == [7, 60]
    with pytest.raises(
        EpisodeMistake, match=r"observation_tokens have \[60\]; the tokenizer's ids go to 49"
    ):
        assemble(result | {"rollout_log_probs": [0.0, -1.0]}, [], 100, vocabulary=50)


def test_rewards_of_turns_stand_at_the_last_tokens_of_the_turns() -> None:
    result, calls = played([9], [([1, 2], [3]), ([1], []), ([], [5])])
    assembled = assemble(
        {**result, "reward": None, "turn_rewards": [0.5, 1, 0]}, calls, 100, vocabulary=1000
    )
    assert assembled.turn_rewards == ((2, 0.5), (4, 1.0))
    assert assembled.reward.reward == 1.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"observation_tokens": None},
            "observation_tokens must be a list of token ids, and is None",
        ),
        ({"observation_tokens": [1, 2.5, 3]}, "observation_tokens must be a list of token ids"),
        ({"action_ranges": [[0, 3]]}, r"start at token 0.*: \[\[0, 3\]\]"),
        ({"action_ranges": [[2, 1]]}, "action_ranges must go up and stay within 3 tokens"),
        ({"action_ranges": [2, 3]}, r"a list of \[start, end\) pairs"),
        ({"rollout_log_probs": [0.0]}, r"returned 1 rollout_log_probs for 3 tokens: \[0\.0\]"),
        ({"rollout_log_probs": [0.0, 0.0, float("nan")]}, "rollout_log_probs that are not finite"),
        ({"reward": [1.0, 2.0]}, "2 rewards for 1 samples"),
        ({"reward": "good"}, "rewards that are not numbers"),
        ({"reward": 10**400}, "too large"),
        ({"extra_logs": {"steps": 10**400}}, "too large"),
        ({"turn_rewards": [10**400]}, "too large"),
        ({"turn_rewards": ["1.0"]}, "turn_rewards that are not numbers"),
        ({"observation_tokens": [7, 1, 2**70]}, "the tokenizer's ids go to 999"),
        ({"scores": float("inf")}, "scores that are not finite"),
        ({"extra_logs": {"steps": "three"}}, "steps"),
        ({"extra_logs": [1]}, "extra_logs that are not a dict"),
        ({"turn_rewards": [1.0, 2.0]}, "returned 2 turn_rewards for 1 action ranges"),
    ],
)
def test_what_is_no_episode_is_refused_with_what_was_seen(
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
def test_a_sample_that_the_engine_could_not_finish_fails_the_episode_that_uses_it(
    own: bool,
) -> None:
    """The log-probabilities of such a sample are zeros, and would be trained on. Which episode
    asked for it does not matter.
    """
    result, [sample] = played([7], [([1, 2], [])])
    broken = replace(
        sample, own=own, answer=replace(sample.answer, finish_reason="engine 0 gave NaN")
    )
    with pytest.raises(
        UserCodeError, match="the engine ended a sample: engine 0 gave NaN"
    ) as error:
        assemble(result, [broken], 100, vocabulary=1000)
    assert error.value.failure is Failure.ENGINE
    assert assemble(
        result, [sample, replace(broken, question={"prompt": [9]})], 100, vocabulary=1000
    )  # not used


def test_conversations_of_an_episode_are_built_from_its_samples() -> None:
    result, calls = played([0, 1], [([2, 3], [0])])
    last, more = played([0, 2], [([2, 3], []), ([1], [])])
    versions = [replace(each, answer=replace(each.answer, weight_versions=(7,))) for each in more]
    assembled = assemble({**last, "earlier": [result]}, [*calls, *versions], 1000, vocabulary=1000)
    [earlier] = assembled.earlier
    assert (earlier.tokens, earlier.rollout_logprobs[2:4]) == (
        [0, 1, 2, 3, 0],
        calls[0].answer.logprobs,
    )
    assert assembled.builder.tokens == last["observation_tokens"]
    assert (assembled.turns, assembled.builder.weight_versions, earlier.weight_versions) == (
        3,
        [0, 7],
        [0],
    )


@pytest.mark.parametrize(
    "earlier", [5, [5], [{}], [{"observation_tokens": [1], "action_ranges": [[0, 1]]}]]
)
def test_conversations_that_are_none_are_refused(earlier: Any) -> None:
    result, calls = played([0], [([1], [])])
    with pytest.raises(EpisodeMistake):
        assemble({**result, "earlier": earlier}, calls, 1000, vocabulary=1000)
