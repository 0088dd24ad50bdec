"""A reward on answers that nobody has sampled yet: labels as right answers, other rows' labels as wrong answers.

Requests are made as a run makes them, so that a reward that looks for an end token finds it here if it finds it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.config.rollout import RuleConfig
from openrlhf.rewards.protocol import Reward, RewardRequest, request_of, shown
from openrlhf.rewards.rule import reward_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answered(tokenizer: PreTrainedTokenizerBase, prompt: str, label: Any, response: str) -> RewardRequest:
    """The request for a response that the policy has ended itself, as in a run."""
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    sampled: list[int] = tokenizer(response, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    if (end := int(tokenizer.eos_token_id)) != (sampled or [None])[-1]:  # type: ignore[arg-type]
        sampled = [*sampled, end]
    return request_of(tokenizer, prompt, label, tokens, sampled)


def wrong_answers(labels: Sequence[Any]) -> list[Any]:
    """For each label the next one that differs; None if all labels are the same."""
    rolled = [[*labels[place + 1 :], *labels[:place]] for place in range(len(labels))]
    return [
        next((other for other in others if other != label), None) for label, others in zip(labels, rolled, strict=True)
    ]


async def reward_preview(
    reward: Reward, prompts: Sequence[str], labels: Sequence[Any], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """One line if the reward fails on labels, or likes them no more than wrong answers; else None.

    Rows whose label is not text are left out.
    """
    rows = [(prompt, label) for prompt, label in zip(prompts, labels, strict=True) if isinstance(label, str) and label]
    wrong = wrong_answers([label for _, label in rows])
    requests = [answered(tokenizer, prompt, label, label) for prompt, label in rows]
    requests += [
        answered(tokenizer, prompt, label, other) for (prompt, label), other in zip(rows, wrong, strict=True) if other
    ]
    results = await reward.score(requests) if rows else []
    if failed := [result for result in results if result.error is not None]:
        return f"The reward failed on {len(failed)} of {len(results)} answers made of labels. The first error:\n{failed[0].error}"
    right, others = ([result.reward or 0.0 for result in part] for part in (results[: len(rows)], results[len(rows) :]))
    if not others or sum(right) / len(right) > sum(others) / len(others):
        return None
    return (
        f"The reward gives right answers (labels with the end token, such as {shown(requests[0].response)}) {right}, and labels "
        f"of other rows {others}. If labels are answers, see what the reward compares: `openrlhf reward test` shows more."
    )


def preview(
    rule: RuleConfig, prompts: Sequence[str], labels: Sequence[Any], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """`reward_preview` of the reward that the flags name, if its labels may be answers."""
    if not (rule.remote_url or rule.verifier == "math"):
        return None
    with reward_of(rule, workers=1) as reward:
        assert reward is not None
        return asyncio.run(reward_preview(reward, prompts, labels, tokenizer))
