"""A reward on answers that nobody has sampled yet: labels as right answers, other rows' labels as
wrong answers.

Requests are made as a run makes them, so that a reward that looks for an end token finds it here if
it finds it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.config.rollout import RuleConfig
from openrlhf.observability.once import warn_once
from openrlhf.rewards.protocol import Reward, RewardRequest, request_of, shown
from openrlhf.rewards.rule import reward_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.trajectory import Prompt


def answered(
    tokenizer: PreTrainedTokenizerBase | None, prompt: str, label: Any, response: str
) -> RewardRequest:
    """The request for a response that the policy has ended itself, as in a run; without a
    tokenizer, for the text as it stands.
    """
    if tokenizer is None:
        return RewardRequest(
            query=prompt + response, prompt=prompt, label=label, response=response, answer=response
        )
    tokens: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    sampled: list[int] = tokenizer(response, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    if (end := int(tokenizer.eos_token_id)) != (sampled or [None])[-1]:  # type: ignore[arg-type]
        sampled = [*sampled, end]
    return request_of(tokenizer, prompt, label, tokens, sampled)


def wrong_requests(
    requests: Sequence[RewardRequest], tokenizer: PreTrainedTokenizerBase | None
) -> list[RewardRequest]:
    """The requests whose label is text, each with the next label that differs as its answer; none
    if all labels are the same.
    """
    labelled = [request for request in requests if isinstance(request.label, str) and request.label]
    wrong: list[RewardRequest] = []
    for place, request in enumerate(labelled):
        following = [*labelled[place + 1 :], *labelled[:place]]
        other = next((each.label for each in following if each.label != request.label), None)
        if other:
            wrong.append(answered(tokenizer, request.prompt, request.label, other))
    return wrong


async def reward_preview(
    reward: Reward, rows: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """One line if the reward fails on labels, or gives them no more than wrong answers; else None.

    Rows whose label is not text are left out.
    """
    rows = [row for row in rows if isinstance(row.label, str) and row.label]
    requests = [answered(tokenizer, row.text, row.label, row.label) for row in rows]
    results = await reward.score([*requests, *wrong_requests(requests, tokenizer)]) if rows else []
    if failed := [result for result in results if result.error is not None]:
        return f"The reward failed on {len(failed)} of {len(results)} answers made of labels. The first error:\n{failed[0].error}"
    right, others = (
        [result.reward or 0.0 for result in part]
        for part in (results[: len(rows)], results[len(rows) :])
    )
    if not others or sum(right) / len(right) > sum(others) / len(others):
        return None
    return (
        f"The reward gives right answers (labels with the end token, such as {shown(requests[0].response)}) {right}, and labels "
        f"of other rows {others}. If labels are answers, see what the reward compares: `openrlhf reward test` shows more."
    )


def check_reward(
    rule: RuleConfig, rows: Sequence[Prompt] = (), tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Load the function or verifier of the flags, or reach the servers, and warn of what
    `reward_preview` says of some rows.

    Raises ConfigError. Labels are scored only if they may be answers.
    """

    async def check(reward: Reward) -> str | None:
        await reward.check()
        answers = rule.remote_url or rule.verifier == "math"
        return await reward_preview(reward, rows, tokenizer) if tokenizer and answers else None

    with reward_of(rule, workers=1) as reward:
        if reward and (line := asyncio.run(check(reward))):
            warn_once(line)
