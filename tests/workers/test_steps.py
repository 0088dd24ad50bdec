"""The ends of a response's steps, and the text that a process reward model scores."""

from __future__ import annotations

import pytest

from openrlhf.rewards.protocol import combined
from openrlhf.workers.steps import StepCutter
from tests.tiny import character_tokenizer
from tests.trainers.episodes import episode

TOKENIZER = character_tokenizer()
MARK = TOKENIZER.convert_tokens_to_ids("?")


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        ("a+b\nc\n", ["a+b\n", "c\n"]),
        ("a\n\n\nb", ["a\n", "\n\nb"]),  # blank text does not count as a step
        ("\na", ["\na"]),
        ("a\nb<eos>", ["a\n", "b"]),
        ("a?b", ["a?", "b"]),  # the policy itself writes the placeholder
        ("<eos>", ["<eos>"]),
        ("\n", ["\n"]),
    ],
)
def test_step_splitter_returns_the_last_token_of_each_step(answer: str, steps: list[str]) -> None:
    prompt, tokens = TOKENIZER("x\ny").input_ids, TOKENIZER(answer).input_ids
    cutter = StepCutter(TOKENIZER, "\n", MARK)
    ends = cutter.ends(prompt + tokens, [False] * len(prompt) + [True] * len(tokens))
    expected, place = [], len(prompt)
    for step in steps:
        place += len(TOKENIZER(step).input_ids)
        expected.append(place - 1)
    assert ends == expected


def test_response_without_sampled_tokens_is_one_step_that_ends_with_its_last_token() -> None:
    assert StepCutter(TOKENIZER, "\n", MARK).ends(TOKENIZER("xa").input_ids, [False, False]) == [1]


def test_marked_text_has_one_placeholder_after_each_step() -> None:
    cutter = StepCutter(TOKENIZER, "\n", MARK)
    tokens = TOKENIZER("xa\nb?c").input_ids
    text, judged = cutter.marked(tokens, [2, 4, 5])
    assert TOKENIZER.decode(text) == "xa\n?b?c?"
    assert [place for place, is_judged in enumerate(judged) if is_judged] == [3, 5, 7]


def test_step_rewards_are_weighted_components_of_the_reward() -> None:
    """The reward also includes a reward model and a rule, each with its own weight."""
    reward = combined(
        episode(reward=3.0, score=3.0, actions=4), [10.0], [1.0, 2.0, 0.5], [0, 0.25, 0, 0.5]
    )
    assert reward.reward == pytest.approx(10 + 2 * 0.75 + 1.5)
    assert reward.turn_rewards == ((1, 0.5), (3, 1.0))
    assert reward.extra_logs["reward_model_2"] == 0.75
