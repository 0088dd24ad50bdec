"""`openrlhf reward test`: the reward of a run, called as a run calls it, on rows that have a
response already.
"""

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from openrlhf.config.reward_test import RewardTestConfig
from openrlhf.config.secrets import without_secrets
from openrlhf.data.errors import check_columns, text_of
from openrlhf.data.findings import report
from openrlhf.data.loading import load_datasets
from openrlhf.data.messages import messages_of
from openrlhf.data.templates import fill_template
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.observability.tables import print_texts
from openrlhf.rewards.labels import check_labels, math_answers
from openrlhf.rewards.preview import answered, wrong_requests
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.rule import reward_of
from openrlhf.rewards.servers import IN_FLIGHT

WRONG = 100  # rows that are scored with a wrong answer too
PRINTED = 2000  # characters of what the reward prints that are shown
EXAMPLES, ERRORS, TEXT = 5, 3, 60  # rows shown of each kind, and characters of their texts


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row and the result of its call. `seconds`: duration of the call, which the rows of one
    group share.
    """

    request: RewardRequest
    result: RewardResult
    seconds: float


def try_reward(config: RewardTestConfig) -> NoReturn:
    """Score the rows, print the scores, and end with status 0, or with 1 above
    --reward.max_error_rate.
    """
    path = config.actor.model_name_or_path
    tokenizer = get_tokenizer(path, flag="--actor.model_name_or_path") if path else None
    requests = list(read_requests(config, tokenizer))
    wrong = [] if config.data.output_key else wrong_requests(requests[:WRONG], tokenizer)
    offer_engines(config.rollout, config.reward)
    logs = Path(f"runs/reward_test-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}/logs")
    with reward_of(config.reward, log_dir=logs) as reward:
        assert reward is not None
        at_once = IN_FLIGHT if config.reward.urls else config.reward.workers
        began = time.monotonic()
        scored = asyncio.run(
            score_all(reward, [*requests, *wrong], at_once=at_once, groups=config.reward.batch)
        )
        seconds = time.monotonic() - began
    scored, misled = scored[: len(requests)], scored[len(requests) :]
    print_scores(scored, seconds=seconds, at_once=at_once)
    if given := rewards_of(misled):
        print(
            f"\nWrong answers (labels of other rows): {len(given):,}, mean reward {fmean(given):.4g}"
        )
    if tokenizer is None:
        print(
            "\nResponses were scored as they stand. In a run they have passed through the tokenizer, and end with its end "
            "token: to see that here, pass --actor.model_name_or_path."
        )
    show_printed(logs)
    errors = len(errors_of([*scored, *misled]))
    raise SystemExit(int(errors > config.reward.max_error_rate * len([*scored, *misled])))


def show_printed(logs: Path) -> None:
    """Show the end of what the reward printed, and where the rest is; a folder with nothing in its
    logs is removed.
    """
    written = [log for log in sorted(logs.glob("*")) if log.stat().st_size]
    if written:
        printed = "".join(log.read_text(errors="replace") for log in written)
        print(
            f"\nPrinted by the reward (all of it: {logs}), the end of it:\n{printed[-PRINTED:].strip()}"
        )
    elif logs.exists():
        shutil.rmtree(logs.parent)


def read_requests(
    config: RewardTestConfig, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[RewardRequest]:
    """A request per row. Without --data.output_key the label stands for a right answer. Raises
    DataError.
    """
    data, verifier = config.data, config.reward.verifier
    most, split, probs = data.max_samples, data.prompt_split, data.prompt_probs
    rows = load_datasets(data.prompt_dataset, split=split, probs=probs, max_samples=most, seed=0)
    columns = {"--data.input_key": data.input_key, "--data.label_key": data.label_key}
    check_columns(rows, columns | {"--data.output_key": data.output_key})
    if verifier and data.label_key:
        labels, source = rows[data.label_key], data.prompt_dataset
        report(
            check_labels(
                verifier,
                labels,
                column=data.label_key,
                origin=lambda row: f"{source}, row {row + 1}",
            )
        )
    for row in rows:
        assert isinstance(row, dict)
        prompt = fill_template(data.input_template, _prompt(row, data.input_key))
        label = row[data.label_key] if data.label_key else ""
        if data.output_key:
            response = text_of(row, data.output_key)
        elif verifier == "math":
            response = math_answers(label)[0]
        else:
            assert data.label_key
            response = text_of(row, data.label_key)
        yield answered(tokenizer, prompt, label, response)


def _prompt(row: Mapping[str, Any], column: str) -> str:
    """A prompt as text; of a chat, what was said, without the marks of a chat template."""
    if isinstance(row[column], str):
        return row[column]
    messages = messages_of(row, column, role="user", flag="--data.input_key")
    return "\n".join(message["content"] for message in messages)


async def score_all(
    reward: Reward, requests: list[RewardRequest], *, at_once: int, groups: bool
) -> list[Scored]:
    """What each request got; with `groups`, neighbours with one prompt share a call."""
    await reward.check()
    turns = asyncio.Semaphore(at_once)

    async def call(group: list[RewardRequest]) -> list[Scored]:
        async with turns:  # waiting for a free process is not the function's time
            began = time.monotonic()
            results = await reward.score(group)
            seconds = time.monotonic() - began
        pairs = zip(group, results, strict=True)
        return [
            Scored(request=request, result=result, seconds=seconds) for request, result in pairs
        ]

    shared_by = attrgetter("prompt") if groups else id
    calls = [call(list(group)) for _, group in groupby(requests, key=shared_by)]
    return [row for rows in await asyncio.gather(*calls) for row in rows]


def print_scores(rows: Sequence[Scored], *, seconds: float, at_once: int) -> None:
    """Print rewards, errors by kind, times, some scored rows and the first errors. `seconds`: the
    time that all calls took.
    """
    for name, value in _facts(rows, seconds, at_once):
        print(f" {name:<14}  {value}")
    if examples := _examples([row for row in rows if row.result.reward is not None]):
        print_texts("Scored", ("reward", "label", "response"), examples)
    for row in errors_of(rows)[:ERRORS]:
        print(f"\n{row.result.failure}, with the response {_end(row.request.response)!r}")
        print(without_secrets(row.result.error or "").strip())


def rewards_of(rows: Sequence[Scored]) -> list[float]:
    """The rewards of the rows that have one."""
    return [row.result.reward for row in rows if row.result.reward is not None]


def errors_of(rows: Sequence[Scored]) -> list[Scored]:
    """The rows whose call failed."""
    return [row for row in rows if row.result.error is not None]


def _facts(rows: Sequence[Scored], seconds: float, at_once: int) -> Iterator[tuple[str, str]]:
    failures, times = (
        Counter(row.result.failure for row in errors_of(rows)),
        sorted(row.seconds for row in rows),
    )
    yield "rows", f"{len(rows):,} in {seconds:.1f} s, {at_once} at a time"
    if rewards := rewards_of(rows):
        ends = f"from {min(rewards):.4g} to {max(rewards):.4g}"
        yield "reward", f"mean {fmean(rewards):.4g}, deviation {pstdev(rewards):.4g}, {ends}"
    yield "errors", f"{failures.total():,} ({failures.total() / len(rows):.1%})"
    for kind, count in failures.most_common():
        yield f"  {kind}", f"{count:,}"
    middle, late = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
    yield (
        "time of a call",
        f"median {middle:.3g} s, 99 % within {late:.3g} s, longest {times[-1]:.3g} s",
    )


def _examples(rows: Sequence[Scored]) -> list[tuple[str, str, str]]:
    """Rows from the lowest reward to the highest, evenly spread in between: reward, label,
    response.
    """
    ordered = sorted(rows, key=lambda row: row.result.reward or 0.0)
    places = (
        {round(i * (len(ordered) - 1) / (EXAMPLES - 1)) for i in range(EXAMPLES)} if rows else ()
    )
    shown = [ordered[place] for place in sorted(places)]
    return [
        (f"{row.result.reward:g}", _end(str(row.request.label)), _end(row.request.response))
        for row in shown
    ]


def _end(text: str) -> str:
    """The end of a text, where its answer is, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT else f"…{line[-TEXT:]}"
