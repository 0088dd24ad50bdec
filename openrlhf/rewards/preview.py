"""Tries a reward before training.

Labels serve as correct answers, and labels of other rows serve as wrong answers. Requests are built
as in a run, so a reward that looks for the eos token finds it in the trial too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from statistics import fmean
from typing import TYPE_CHECKING, Any

from openrlhf.checks import Finding
from openrlhf.config.rollout import RuleConfig
from openrlhf.data.continuation import encode_as_sample, encode_text
from openrlhf.rewards.protocol import Reward, RewardRequest, request_of, shown
from openrlhf.rewards.rule import reward_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.core.trajectory import Prompt

SHOWN_ERRORS = 3  # maximum number of different errors in a message


def answered(
    tokenizer: PreTrainedTokenizerBase | None, prompt: str, label: Any, response: str
) -> RewardRequest:
    """Return the request for a response, with the eos token appended as in a run.

    The response is tokenized as the continuation of the prompt. Without a tokenizer, the request
    contains the unchanged prompt and response.
    """
    if tokenizer is None:
        return RewardRequest(
            query=prompt + response, prompt=prompt, label=label, response=response, answer=response
        )
    tokens = encode_text(tokenizer, prompt)
    sampled = encode_as_sample(tokenizer, tokens, response)
    return request_of(tokenizer, prompt, label, tokens, sampled)


def wrong_requests(
    requests: Sequence[RewardRequest], tokenizer: PreTrainedTokenizerBase | None
) -> list[RewardRequest]:
    """Return a request with a wrong answer for each text label.

    The answer is the next text label that differs. Returns no requests if all labels are equal.
    """
    labelled = [request for request in requests if _is_text(request.label)]
    wrong: list[RewardRequest] = []
    for place, request in enumerate(labelled):
        for other in [*labelled[place + 1 :], *labelled[:place]]:
            if other.label != request.label:
                wrong.append(answered(tokenizer, request.prompt, request.label, other.label))
                break
    return wrong


def _is_text(label: Any) -> bool:
    return isinstance(label, str) and label != ""


async def reward_preview(
    reward: Reward, rows: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[Finding]:
    """Return a notice if the reward fails on labels or does not prefer them to wrong answers.

    Rows whose label is not text are skipped.
    """
    rows = [row for row in rows if _is_text(row.label)]
    if not rows:
        return []
    correct = [answered(tokenizer, row.text, row.label, row.label) for row in rows]
    results = await reward.score([*correct, *wrong_requests(correct, tokenizer)])
    errors = [result.error for result in results if result.error is not None]
    if errors:
        distinct = "\n".join(list(dict.fromkeys(errors))[:SHOWN_ERRORS])
        seen = (
            f"The reward failed on {len(errors)} of {len(results)} test answers built from the "
            f"labels:\n{distinct}"
        )
        return [Finding(seen)]
    rewards = [result.reward or 0.0 for result in results]
    correct_rewards = rewards[: len(rows)]
    wrong_rewards = rewards[len(rows) :]
    if not wrong_rewards or fmean(correct_rewards) > fmean(wrong_rewards):
        return []
    seen = (
        f"The reward does not prefer correct answers. It gives {correct_rewards} to the labels "
        f"(with the eos token, such as {shown(correct[0].response)}) but {wrong_rewards} to the "
        "labels of other rows."
    )
    fix = (
        "If labels are answers, check what the reward compares: `openrlhf reward test` shows more."
    )
    return [Finding(seen, fix)]


def check_reward(
    rule: RuleConfig, rows: Sequence[Prompt] = (), tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Finding]:
    """Load the configured function or verifier, or connect to the servers, and try it on some rows.

    Returns the notice from `reward_preview`, if any. Labels are scored only if they are plausible
    answers. Raises ConfigError.
    """

    async def check(reward: Reward) -> list[Finding]:
        async with aclosing(reward):
            await reward.check()
            labels_are_answers = rule.remote_url or rule.verifier == "math"
            if not tokenizer or not labels_are_answers:
                return []
            return await reward_preview(reward, rows, tokenizer)

    with reward_of(rule, workers=1) as reward:
        if not reward:
            return []
        return asyncio.run(check(reward))


def check_reward_file(rule: RuleConfig) -> list[Finding]:
    """Load the user's reward function, if any, without waiting for servers. Raises ConfigError."""
    if not rule.function_path:
        return []
    return check_reward(rule)
