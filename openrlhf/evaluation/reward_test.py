"""`openrlhf reward test`, which calls a run's reward on rows with given responses."""

import asyncio
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median_high, pstdev
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from openrlhf.checks import loaded, report
from openrlhf.config.reward_test import RewardTestConfig
from openrlhf.data.errors import check_columns, text_of
from openrlhf.data.loading import load_datasets
from openrlhf.data.messages import messages_of
from openrlhf.data.templates import fill_template
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.masking import without_secrets
from openrlhf.observability.tables import print_texts
from openrlhf.reporting import say, warn
from openrlhf.rewards.labels import check_labels, math_answers
from openrlhf.rewards.preview import SHOWN_ERRORS, answered, check_reward_file, wrong_requests
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.rule import reward_of
from openrlhf.rewards.servers import IN_FLIGHT

WRONG_ANSWERS = 100  # number of rows that are also scored with a wrong answer
SHOWN_OUTPUT = 2000  # maximum number of characters of the reward's output to print
SHOWN_EXAMPLES = 5
SHOWN_TEXT = 60  # maximum number of characters of a response or label to print


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row and the result of its reward call."""

    request: RewardRequest
    result: RewardResult
    seconds: float  # duration of the reward call, which may have scored several rows


def try_reward(config: RewardTestConfig) -> NoReturn:
    """Score the rows, print the scores, and exit.

    The exit status is 1 if the error rate exceeds --reward.max_error_rate, else 0.
    """
    path = config.actor.model_name_or_path
    tokenizer = None
    if path:
        tokenizer = get_tokenizer(path, flag="--actor.model_name_or_path")
    requests = loaded(
        partial(read_requests, config, tokenizer), partial(check_reward_file, config.reward)
    )
    wrong: list[RewardRequest] = []
    if not config.data.output_key:
        wrong = wrong_requests(requests[:WRONG_ANSWERS], tokenizer)
    offer_engines(config.rollout, config.reward)
    at_once = config.reward.workers
    if config.reward.urls:
        at_once = IN_FLIGHT
    logs = Path(tempfile.mkdtemp(prefix="openrlhf-reward-test-"))
    try:
        with reward_of(config.reward, log_dir=logs) as reward:
            assert reward is not None
            started = time.monotonic()
            scored = asyncio.run(score_all(reward, [*requests, *wrong], at_once=at_once))
            seconds = time.monotonic() - started
    except BaseException:
        if not read_output(logs):
            shutil.rmtree(logs)
        raise
    right = scored[: len(requests)]
    print_scores(right, seconds=seconds, at_once=at_once)
    print_wrong_answers(rewards_of(right), rewards_of(scored[len(requests) :]))
    if tokenizer is None:
        say(
            "\nResponses were scored unchanged. In a run, the tokenizer encodes and decodes them "
            "and appends the end-of-text token. To score them that way, pass "
            "--actor.model_name_or_path."
        )
    errors = errors_of(scored)
    show_output(logs, keep=bool(errors))
    if len(errors) > config.reward.max_error_rate * len(scored):
        raise SystemExit(1)
    raise SystemExit(0)


def print_wrong_answers(right_rewards: Sequence[float], wrong_rewards: Sequence[float]) -> None:
    """Print the mean reward of wrong answers, and warn if all rewards are equal."""
    if not wrong_rewards:
        return
    say(
        f"\nWrong answers (labels of other rows): {len(wrong_rewards):,}, mean reward "
        f"{fmean(wrong_rewards):.4g}"
    )
    if right_rewards and len({*right_rewards, *wrong_rewards}) == 1:
        warn(
            f"All right and wrong answers have the same reward, {wrong_rewards[0]:.4g}. A model "
            "cannot learn from a reward that does not depend on the answer. Check what the reward "
            "compares."
        )


def read_output(logs: Path) -> str:
    """Return everything that the reward has printed."""
    output = ""
    for log in sorted(logs.glob("*")):
        output += log.read_text(errors="replace")
    return output


def show_output(logs: Path, *, keep: bool) -> None:
    """Print the end of the reward's output, and delete its logs.

    The logs are kept if they are longer than the part that was printed, or if `keep` is true and
    they are not empty.
    """
    output = read_output(logs).strip()
    kept = output != "" and (keep or len(output) > SHOWN_OUTPUT)
    if kept:
        say(f"\nLast output of the reward (complete output in {logs}):")
    elif output:
        say("\nOutput of the reward:")
    if output:
        say(output[-SHOWN_OUTPUT:].strip())
    if not kept:
        shutil.rmtree(logs)


def read_requests(
    config: RewardTestConfig, tokenizer: PreTrainedTokenizerBase | None
) -> list[RewardRequest]:
    """Return a request for each row. Raises DataError.

    Without --data.output_key, the label serves as a correct response.
    """
    data = config.data
    verifier = config.reward.verifier
    rows = load_datasets(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        max_samples=data.max_samples,
        seed=0,
    )
    columns = {
        "--data.input_key": data.input_key,
        "--data.label_key": data.label_key,
        "--data.output_key": data.output_key,
    }
    check_columns(rows, columns)
    if verifier and data.label_key:
        findings = check_labels(
            verifier,
            rows[data.label_key],
            column=data.label_key,
            origin=lambda row: f"{data.prompt_dataset}, row {row + 1}",
        )
        report(*findings)
    requests: list[RewardRequest] = []
    for row in rows:
        assert isinstance(row, dict)
        prompt = fill_template(data.input_template, _prompt(row, data.input_key))
        label = ""
        if data.label_key:
            label = row[data.label_key]
        if data.output_key:
            response = text_of(row, data.output_key)
        elif verifier == "math":
            response = math_answers(label)[0]
        else:
            assert data.label_key
            response = text_of(row, data.label_key)
        requests.append(answered(tokenizer, prompt, label, response))
    return requests


def _prompt(row: Mapping[str, Any], column: str) -> str:
    """Return a prompt as text. A chat's messages are joined without a chat template."""
    if isinstance(row[column], str):
        return row[column]
    messages = messages_of(row, column, role="user", flag="--data.input_key")
    return "\n".join(message["content"] for message in messages)


async def score_all(reward: Reward, requests: list[RewardRequest], *, at_once: int) -> list[Scored]:
    """Score all requests, `at_once` calls at a time.

    With --reward.batch, adjacent requests with the same prompt share a call. A single request is
    passed twice, because a run passes several samples per prompt; a function that returns too few
    rewards therefore fails in this test too.
    """
    turns = asyncio.Semaphore(at_once)

    async def call(group: list[RewardRequest]) -> list[Scored]:
        samples = group
        if reward.batch and len(group) == 1:
            samples = group * 2
        async with turns:
            started = time.monotonic()  # excludes the wait for a free process
            results = await reward.score(samples)
            seconds = time.monotonic() - started
        pairs = zip(group, results[: len(group)], strict=True)
        return [
            Scored(request=request, result=result, seconds=seconds) for request, result in pairs
        ]

    key: Callable[[RewardRequest], Any] = id
    if reward.batch:
        key = attrgetter("prompt")
    async with aclosing(reward):
        await reward.check()
        calls = [call(list(group)) for _, group in groupby(requests, key=key)]
        return list(chain.from_iterable(await asyncio.gather(*calls)))


def print_scores(rows: Sequence[Scored], *, seconds: float, at_once: int) -> None:
    """Print rewards, errors by kind, durations, some scored rows and the first distinct errors.

    `seconds` is the total duration of all calls.
    """
    for name, value in _facts(rows, seconds, at_once):
        say(f" {name:<14}  {value}")
    examples = _examples(rows)
    if examples:
        print_texts("Scored", ("reward", "label", "response"), examples)
    failed_rows: dict[str, list[Scored]] = {}
    for row in errors_of(rows):
        failed_rows.setdefault(row.result.error or "", []).append(row)
    for error, same in list(failed_rows.items())[:SHOWN_ERRORS]:
        response = _end(same[0].request.response)
        say(f"\n{same[0].result.failure} in {len(same):,} row(s), first with {response!r}")
        say(without_secrets(error).strip())


def rewards_of(rows: Sequence[Scored]) -> list[float]:
    """Return the rewards of all rows that were scored."""
    return [row.result.reward for row in rows if row.result.reward is not None]


def errors_of(rows: Sequence[Scored]) -> list[Scored]:
    """Return the rows whose reward call failed."""
    return [row for row in rows if row.result.error is not None]


def _facts(rows: Sequence[Scored], seconds: float, at_once: int) -> Iterator[tuple[str, str]]:
    yield "rows", f"{len(rows):,} in {seconds:.1f} s, {at_once} at a time"
    rewards = rewards_of(rows)
    if rewards:
        ends = f"from {min(rewards):.4g} to {max(rewards):.4g}"
        yield "reward", f"mean {fmean(rewards):.4g}, deviation {pstdev(rewards):.4g}, {ends}"
    failures = Counter(row.result.failure for row in errors_of(rows))
    yield "errors", f"{failures.total():,} ({failures.total() / len(rows):.1%})"
    for kind, count in failures.most_common():
        yield f"  {kind}", f"{count:,}"
    times = sorted(row.seconds for row in rows)
    median = median_high(times)
    percentile_99 = times[math.ceil(0.99 * len(times)) - 1]
    yield (
        "time of a call",
        f"median {median:.3g} s, 99 % within {percentile_99:.3g} s, longest {times[-1]:.3g} s",
    )


def _examples(rows: Sequence[Scored]) -> list[tuple[str, str, str]]:
    """Return reward, label and response of some rows, from the lowest reward to the highest.

    The rows are evenly spaced in the order of their rewards.
    """
    rewarded = [row for row in rows if row.result.reward is not None]
    if not rewarded:
        return []
    rewarded.sort(key=lambda row: row.result.reward or 0.0)
    places = {round(i * (len(rewarded) - 1) / (SHOWN_EXAMPLES - 1)) for i in range(SHOWN_EXAMPLES)}
    examples: list[tuple[str, str, str]] = []
    for place in sorted(places):
        row = rewarded[place]
        label = _end(str(row.request.label))
        examples.append((f"{row.result.reward:g}", label, _end(row.request.response)))
    return examples


def _end(text: str) -> str:
    """Return the end of a text, which contains the answer, on one line."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_TEXT:
        return line
    return f"…{line[-SHOWN_TEXT:]}"
