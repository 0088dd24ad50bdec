"""Trial of a reward before training: labels are correct answers, other rows' labels wrong ones.

Requests are built as in a run, so that a reward that looks for an end token finds it in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from statistics import fmean
from typing import TYPE_CHECKING, Any

from openrlhf.checks import Finding
from openrlhf.config.rollout import RuleConfig
from openrlhf.rewards.protocol import Reward, RewardRequest, request_of, shown
from openrlhf.rewards.rule import reward_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.core.trajectory import Prompt


def answered(
    tokenizer: PreTrainedTokenizerBase | None, prompt: str, label: Any, response: str
) -> RewardRequest:
    """Return the request for a response that ends with the end token, as in a run.

    Without a tokenizer, the request holds the texts unchanged.
    """
    if tokenizer is None:
        return RewardRequest(
            query=prompt + response, prompt=prompt, label=label, response=response, answer=response
        )
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    sampled: list[int] = tokenizer(response, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    if not sampled or sampled[-1] != end:
        sampled = [*sampled, end]
    return request_of(tokenizer, prompt, label, tokens, sampled)


def wrong_requests(
    requests: Sequence[RewardRequest], tokenizer: PreTrainedTokenizerBase | None
) -> list[RewardRequest]:
    """Return the requests whose label is text, each answered with the next label that differs.

    The list is empty if all labels are the same.
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
    """Return a notice if the reward fails on labels, or does not prefer them to wrong answers.

    Rows whose label is not text are left out.
    """
    rows = [row for row in rows if _is_text(row.label)]
    if not rows:
        return []
    correct = [answered(tokenizer, row.text, row.label, row.label) for row in rows]
    results = await reward.score([*correct, *wrong_requests(correct, tokenizer)])
    failed = [result for result in results if result.error is not None]
    if failed:
        seen = (
            f"The reward failed on {len(failed)} of {len(results)} answers made of labels. "
            f"The first error:\n{failed[0].error}"
        )
        return [Finding(seen)]
    rewards = [result.reward or 0.0 for result in results]
    correct_rewards = rewards[: len(rows)]
    wrong_rewards = rewards[len(rows) :]
    if not wrong_rewards or fmean(correct_rewards) > fmean(wrong_rewards):
        return []
    seen = (
        f"The reward of correct answers (labels with the end token, such as "
        f"{shown(correct[0].response)}) is {correct_rewards}, of labels of other rows "
        f"{wrong_rewards}."
    )
    fix = (
        "If labels are answers, check what the reward compares: `openrlhf reward test` shows more."
    )
    return [Finding(seen, fix)]


def check_reward(
    rule: RuleConfig, rows: Sequence[Prompt] = (), tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Finding]:
    """Load the function or verifier of the flags, or reach the servers, and try it on some rows.

    Returns the notice of `reward_preview`, if any. Labels are scored only if they may be answers.
    Raises ConfigError.
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
