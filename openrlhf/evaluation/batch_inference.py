"""`openrlhf batch_inference`, which answers a dataset's prompts or scores its answers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.checks import report
from openrlhf.config.flags import UserError
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.data.clock import set_clock
from openrlhf.data.errors import DataError
from openrlhf.data.first_look import TextFormat, record
from openrlhf.data.first_start import FirstStart
from openrlhf.data.loading import Table, load_datasets
from openrlhf.data.prompts import AnsweredDataset, PromptDataset
from openrlhf.data.shown import SHOWN, show_template, show_text
from openrlhf.data.templates import encode
from openrlhf.evaluation.comparing import given_text
from openrlhf.evaluation.journal import Journal, start_of_request, writing_results
from openrlhf.evaluation.post_processing import POST_PROCESSORS, Rows, by_input
from openrlhf.evaluation.processes import Progress, engines, recorded_run, reward_models
from openrlhf.files import write_atomically
from openrlhf.launch import settings
from openrlhf.launch.identity import inference_identity, request_identity
from openrlhf.launch.prompt_data import (
    check_reward_formats,
    policy_tokenizer,
    prompt_findings,
    prompts_of,
    scorer_tokenizer,
)
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import json_line
from openrlhf.reporting import notice, say
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.generator import Request, RolloutGenerator

MODEL = "--model.model_name_or_path"


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Answer or score all rows that have no result yet, and write the output file.

    Raises UserError if any row failed.
    """
    report(*check_engine_args(config.vllm.engine_args))
    path = str(config.model.model_name_or_path)
    if config.samples_answers:
        tokenizer = policy_tokenizer(config, path, flag=MODEL)
    else:
        tokenizer = scorer_tokenizer(config)
    final = Path(config.output_path)
    rows = load_rows(config)
    request = request_identity(config, rows, tokenizer)
    first_start = start_of_request(final, request)
    prompts, identity = rendered_rows(config, tokenizer, rows, first_start)
    if config.dry_run:
        show_rows(config, tokenizer, prompts)
        return
    journal = Journal(final, identity, request=request)
    with recorded_run(config) as recorder:
        missing = [prompt for prompt in prompts if prompt.index not in journal.results]
        recorder.display.note(
            f"{len(prompts)} rows, {len(missing)} without a result. Partial results: {journal.path}"
        )
        recorder.display.begin(len(prompts), done=len(journal.results))
        run_models = scored
        if config.samples_answers:
            run_models = answered
        with run_models(config, tokenizer, missing, recorder) as groups:
            failed = keep(groups, journal, recorder)
        if journal.results:
            write_results(config, prompts, journal, recorder)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(prompts)} rows failed. Run the same command again to retry "
            f"them. First failure, row {failed[0].prompt.index + 1}: {failed[0].error}"
        )
    journal.finish()


def load_rows(config: BatchInferenceConfig) -> Table:
    """Load the rows of --data.dataset, without rendering them. Raises DataError."""
    data = config.data
    return load_datasets(
        data.dataset,
        split=data.dataset_split,
        probs=data.dataset_probs,
        max_samples=data.max_samples,
        seed=config.train.seed,
    )


def rendered_rows(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, rows: Table, begun: FirstStart
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the prompts and the identity of a command that started at `begun`.

    Raises DataError.
    """
    set_clock(tokenizer, begun.moment)
    prompts = read_rows(config, tokenizer, rows, follows=begun.trained_format)
    return prompts, inference_identity(config, prompts) | begun.entries


def read_rows(
    config: BatchInferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Table,
    *,
    follows: bool = True,
) -> list[Prompt]:
    """Return the prompts to answer or the full texts to score. Raises DataError.

    Records the text format of the prompts in the tokenizer. If `follows` is true, the default is
    the text format that the model was trained with.
    """
    path = str(config.model.model_name_or_path)
    rows_of: Any = PromptDataset
    model: str | None = f"{MODEL} {path}"
    if not config.samples_answers:
        rows_of = AnsweredDataset
        model = f"--reward.model_name_or_path {config.reward.models[0]}"
    if not follows:
        model = None
    dataset: Any = prompts_of(
        config, rows_of, tokenizer, rows, model=model, generates=config.samples_answers
    )
    if config.samples_answers:
        report(*prompt_findings(config, dataset, tokenizer, model=f"{MODEL} {path}"))
    else:
        used = TextFormat.of(dataset.data, tokenizer)
        record(tokenizer, used)
        report(*check_reward_formats(config, used, [dataset[0].text]))
        notice(dataset.summary)
    numbers = range(len(dataset))
    if config.iter is not None:
        first = config.iter * config.rollout.batch_size
        numbers = numbers[first : first + config.rollout.batch_size]
    if not numbers:
        raise DataError(
            f"--iter {config.iter} starts after the last row: --data.dataset has {len(dataset)} "
            "rows. Choose a smaller number."
        )
    prompts: list[Prompt] = [replace(dataset[row], index=row) for row in numbers]
    suffix = config.csft.suffix
    if not suffix:
        return prompts
    encoded = encode(tokenizer, [prompt.text + suffix for prompt in prompts])
    return [
        replace(prompt, text=longer.text, tokens=longer.tokens)
        for prompt, longer in zip(prompts, encoded, strict=True)
    ]


def show_rows(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> None:
    """Print the text format, and the first texts as the model sees them.

    When scoring, marks the last token, at which the reward is read.
    """
    say(f"{len(prompts)} rows. {show_template(tokenizer)}")
    room = config.data.max_len
    if config.samples_answers:
        room = settings.inference_sampling(config).prompt_room
    for row in prompts[:SHOWN]:
        marks: list[str | None] = []
        if not config.samples_answers:
            marks = [*[None] * (len(row.tokens) - 1), ""]
        say(show_text(f"row {row.index + 1}", row.tokens[-room:], tokenizer, marks))


@contextmanager
def answered(
    config: BatchInferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    recorder: Recorder,
) -> Iterator[Iterable[list[Trajectory]]]:
    """Run engines until the block exits, and yield the answers to each prompt as they finish."""
    path = str(config.model.model_name_or_path)
    request = Request(spec=settings.inference_sampling(config), step=0)
    with (
        engines(config, path, tokenizer, name="vllm", recorder=recorder) as fleet,
        closing(BackgroundLoop()) as loop,
    ):
        stream = RolloutGenerator(fleet, tokenizer, None).stream(
            prompts, request, groups=len(prompts), at_once=config.rollout.batch_size
        )
        yield loop.iterate(stream, config.train.step_timeout)


@contextmanager
def scored(
    config: BatchInferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    recorder: Recorder,
) -> Iterator[Iterable[list[Trajectory]]]:
    """Run reward models until the block exits, and yield the scored texts."""
    size = config.rollout.batch_size

    def rewarded() -> Iterator[list[Trajectory]]:
        for start in range(0, len(prompts), size):
            texts = [
                given_text(tokenizer, prompt.index, "", prompt.tokens)
                for prompt in prompts[start : start + size]
            ]
            for text in models.score(texts):
                yield [text]

    with reward_models(config, logs=recorder.folder.logs) as models:
        yield rewarded()


def keep(
    groups: Iterable[list[Trajectory]], journal: Journal, recorder: Recorder
) -> list[Trajectory]:
    """Write each finished row to the journal, and show the throughput.

    The throughput counts sampled tokens, or the tokens of scored texts. Returns one failed answer
    for each failed row.
    """
    failed: list[Trajectory] = []
    tokens = 0
    started = monotonic()
    progress = Progress(recorder.display)
    for group in groups:
        results: list[str | float] = []
        for answer in group:
            if answer.failed:
                continue
            tokens += answer.num_actions or len(answer.tokens)
            if answer.reward is None:
                results.append(answer.response_text)
            else:
                results.append(answer.reward)
        if len(results) == len(group):
            journal.add(group[0].prompt.index, results)
        else:
            failed.append(next(answer for answer in group if answer.failed))
        done = len(journal.results)
        tokens_per_s = tokens / max(monotonic() - started, 1e-9)
        text = f"{done} rows finished, {len(failed)} rows failed, {tokens_per_s:,.0f} tokens/s"
        progress.show(text, done=done)
    return failed


def write_results(
    config: BatchInferenceConfig, prompts: Sequence[Prompt], journal: Journal, recorder: Recorder
) -> None:
    """Write the output file in dataset order. Raises DataError if the file would be empty."""
    lines: Rows = []
    for prompt in prompts:
        for result in journal.results.get(prompt.index, []):
            if config.samples_answers:
                lines.append({"input": prompt.text, "output": result})
            else:
                lines.append({"input": prompt.text, "output": prompt.label, "reward": result})
    if not config.samples_answers:
        log_rewards(lines, recorder)
        lines = POST_PROCESSORS[config.post_processor](lines, config)
    if not lines:
        raise DataError(
            f"No pairs to write to {journal.final}. Sample several answers per prompt with "
            "--best_of_n."
        )
    with writing_results(journal.final):
        write_atomically(journal.final, map(json_line, lines))
    recorder.display.note(
        f"Wrote {len(lines)} lines to {journal.final}. Inputs are fully rendered prompts: train "
        "with --data.input_template {}."
    )


def log_rewards(lines: Rows, recorder: Recorder) -> None:
    """Log and print the mean and standard deviation of all rewards."""
    rewards = [line["reward"] for line in lines]
    mean = fmean(rewards)
    deviation = 0.0
    if len(rewards) > 1:
        deviation = stdev(rewards)
    recorder.log(0, {"eval/reward_mean": mean, "eval/reward_std": deviation})
    recorder.display.note(
        f"{len(rewards)} answers to {len(by_input(lines))} inputs: mean reward {mean:.4f}, "
        f"standard deviation {deviation:.4f}"
    )
