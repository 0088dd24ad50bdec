"""`openrlhf reward test`: the reward of a run, called as a run calls it, on rows that have a response already."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from openrlhf.config.reward_test import RewardTestConfig, ScoredDataConfig
from openrlhf.data.errors import check_columns, row_error, text_of
from openrlhf.data.loading import key_columns, load_datasets
from openrlhf.data.templates import fill_template, to_messages
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.observability.tables import ScoredRow, print_scores
from openrlhf.rewards.preview import answered, wrong_requests
from openrlhf.rewards.protocol import Reward, RewardRequest
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.rule import reward_of
from openrlhf.rewards.servers import IN_FLIGHT

WRONG = 100  # rows that are scored with a wrong answer too
PRINTED = 2000  # characters of what the reward prints that are shown


def try_reward(config: RewardTestConfig) -> NoReturn:
    """Score the rows, print the scores, and end with status 0, or with 1 above --reward.max_error_rate."""
    path = config.actor.model_name_or_path
    tokenizer = get_tokenizer(path, flag="--actor.model_name_or_path") if path else None
    requests = list(read_requests(config.data, tokenizer))
    wrong = [] if config.data.output_key else wrong_requests(requests[:WRONG], tokenizer)
    offer_engines(config.rollout, config.reward)
    logs = Path(f"runs/reward_test-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}/logs")
    with reward_of(config.reward, log_dir=logs) as reward:
        assert reward is not None
        at_once = IN_FLIGHT if config.reward.urls else config.reward.workers
        began = time.monotonic()
        scored = asyncio.run(score_all(reward, [*requests, *wrong], at_once=at_once, groups=config.reward.batch))
        seconds = time.monotonic() - began
    scored, misled = scored[: len(requests)], scored[len(requests) :]
    print_scores(scored, seconds=seconds, at_once=at_once)
    if given := [row.reward for row in misled if row.reward is not None]:
        print(f"\nWrong answers (labels of other rows): {len(given):,}, mean reward {fmean(given):.4g}")
    if tokenizer is None:
        print(
            "\nResponses were scored as they stand. In a run they have passed through the tokenizer, and end with its end "
            "token: to see that here, pass --actor.model_name_or_path."
        )
    show_printed(logs)
    errors = sum(row.error is not None for row in [*scored, *misled])
    raise SystemExit(int(errors > config.reward.max_error_rate * len([*scored, *misled])))


def show_printed(logs: Path) -> None:
    """Show the end of what the reward printed, and where the rest is; a folder with nothing in its logs is removed."""
    written = [log for log in sorted(logs.glob("*")) if log.stat().st_size]
    if written:
        printed = "".join(log.read_text(errors="replace") for log in written)
        print(f"\nPrinted by the reward (all of it: {logs}), the end of it:\n{printed[-PRINTED:].strip()}")
    elif logs.exists():
        shutil.rmtree(logs.parent)


def read_requests(data: ScoredDataConfig, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[RewardRequest]:
    """A request per row. Without --data.output_key the label stands for a right answer. Raises DataError."""
    most, split, probs, text = data.max_samples, data.prompt_split, data.prompt_probs, key_columns(data)
    rows = load_datasets(data.prompt_dataset, split=split, probs=probs, max_samples=most, seed=0, text=text)
    columns = {"--data.input_key": data.input_key, "--data.label_key": data.label_key}
    check_columns(rows.column_names, columns | {"--data.output_key": data.output_key})
    column = data.output_key or data.label_key
    assert column
    for row in rows:
        assert isinstance(row, dict)
        prompt = fill_template(data.input_template, _prompt(row, data.input_key))
        label = row[data.label_key] if data.label_key else ""
        yield answered(tokenizer, prompt, label, text_of(row, column))


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
        return [
            ScoredRow(
                response=request.response,
                label=str(request.label),
                reward=result.reward,
                seconds=seconds,
                failure=result.failure,
                error=result.error,
            )
            for request, result in zip(group, results, strict=True)
        ]

    shared_by = attrgetter("prompt") if groups else id
    calls = [call(list(group)) for _, group in groupby(requests, key=shared_by)]
    return [row for rows in await asyncio.gather(*calls) for row in rows]
