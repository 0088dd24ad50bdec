"""`openrlhf reward test`: the reward of a run, called as a run calls it, on rows that have a response already."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from openrlhf.config.options import ConfigError
from openrlhf.config.reward_test import RewardTestConfig, ScoredDataConfig
from openrlhf.data.errors import DataError, check_columns, row_error, text_of
from openrlhf.data.loading import load_datasets
from openrlhf.data.rows import number_rows
from openrlhf.data.templates import fill_template, to_messages
from openrlhf.observability.score_table import ScoredRow, print_scores
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult
from openrlhf.rewards.rule import offer_remote_engines, reward_of
from openrlhf.rewards.servers import IN_FLIGHT

USER_ERRORS = (ConfigError, DataError)
PRINTED = 2000  # characters of what the reward prints that are shown


def try_reward(config: RewardTestConfig) -> int:
    """Score the rows, print what came of it, and return the command's exit status: 1 above --reward.max_error_rate."""
    requests = list(read_requests(config.data))
    offer_remote_engines(config.rollout, config.reward)
    with tempfile.TemporaryDirectory() as logs, reward_of(config.reward, log_dir=Path(logs)) as reward:
        assert reward is not None
        at_once = IN_FLIGHT if config.reward.urls else config.reward.workers
        began = time.monotonic()
        scored = asyncio.run(score_all(reward, requests, at_once=at_once, groups=config.reward.batch))
        seconds = time.monotonic() - began
        printed = "".join(log.read_text(errors="replace") for log in sorted(Path(logs).iterdir()))
    print_scores(scored, seconds=seconds, at_once=at_once)
    if printed:
        print(f"\nPrinted by the reward, the end of it:\n{printed[-PRINTED:].strip()}")
    errors = sum(row.error is not None for row in scored)
    return int(errors > config.reward.max_error_rate * len(scored))


def read_requests(data: ScoredDataConfig) -> Iterator[RewardRequest]:
    """A request per row. Without --data.output_key the label stands for a right answer. Raises DataError."""
    rows = number_rows(
        load_datasets(
            data.prompt_dataset, split=data.prompt_split, probs=data.prompt_probs, max_samples=data.max_samples, seed=0
        )
    )
    columns = {"--data.input_key": data.input_key, "--data.label_key": data.label_key}
    check_columns(rows.column_names, columns | {"--data.output_key": data.output_key})
    column = data.output_key or data.label_key
    assert column
    for row in rows:
        assert isinstance(row, dict)
        prompt = fill_template(data.input_template, _prompt(row, data.input_key))
        label, response = row[data.label_key] if data.label_key else "", text_of(row, column)
        yield RewardRequest(query=prompt + response, prompt=prompt, label=label, response=response)


def _prompt(row: Mapping[str, Any], column: str) -> str:
    """A prompt as text; of a chat, what was said, without the marks of a chat template."""
    try:
        return (
            row[column] if isinstance(row[column], str) else "\n".join(m["content"] for m in to_messages(row[column]))
        )
    except ValueError as error:
        raise row_error(row, column, f"{error}. --data.input_key names this column.") from error


async def score_all(reward: Reward, requests: list[RewardRequest], *, at_once: int, groups: bool) -> list[ScoredRow]:
    """What each request got; with `groups`, neighbours with one prompt share a call."""
    await reward.check()
    turns = asyncio.Semaphore(at_once)

    async def call(group: list[RewardRequest]) -> list[ScoredRow]:
        async with turns:  # waiting for a free process is not the function's time
            began = time.monotonic()
            results = await reward.score(group)
            seconds = time.monotonic() - began
        return [_row(request, result, seconds) for request, result in zip(group, results, strict=True)]

    calls = (
        [list(group) for _, group in groupby(requests, key=lambda r: r.prompt)] if groups else [[r] for r in requests]
    )
    return [each for group in await asyncio.gather(*map(call, calls)) for each in group]


def _row(request: RewardRequest, result: RewardResult, seconds: float) -> ScoredRow:
    return ScoredRow(
        response=request.response_text,
        label=str(request.label),
        reward=result.reward,
        seconds=seconds,
        failure=result.failure,
        error=result.error,
    )
