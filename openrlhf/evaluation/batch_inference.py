"""`openrlhf batch_inference`: answers to all prompts of a dataset, or the rewards of answers, in a
file.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import UserError, notice
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
from openrlhf.evaluation.journal import (
    Journal,
    has_another_request,
    is_complete,
    request_of,
    start_of_results,
)
from openrlhf.evaluation.post_processing import POST_PROCESSORS, by_input
from openrlhf.evaluation.runs import (
    NOTE_EVERY_S,
    engines,
    reward_models,
    say_engines_start,
    started,
)
from openrlhf.files import write_atomically
from openrlhf.launch import prompt_data, settings
from openrlhf.launch.identity import inference_identity, request_identity
from openrlhf.launch.prompt_data import (
    look_at_prompts,
    policy_tokenizer,
    prompts_of,
    scorer_tokenizer,
)
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import json_line
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import engine_device
from openrlhf.rollout.generator import Request, RolloutGenerator

MODEL = "--model.model_name_or_path"


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Answer or score all rows that have no result yet, and write the file. Raises UserError if a
    row failed.
    """
    check_engine_args(config.vllm.engine_args, engine_device())
    path = str(config.model.model_name_or_path)
    tokenizer = (
        policy_tokenizer(config, path, flag=MODEL)
        if config.samples_answers
        else scorer_tokenizer(config)
    )
    final = Path(config.output_path)
    rows = load_rows(config)
    request = request_identity(config, rows, tokenizer)
    begun = start_of_request(config, tokenizer, rows, final, request)
    prompts, identity = rendered_rows(config, tokenizer, rows, begun)
    if config.dry_run:
        return show_rows(config, tokenizer, prompts)
    journal = Journal(final, identity, request=request)
    with started(config) as recorder:
        missing = [prompt for prompt in prompts if prompt.index not in journal.results]
        recorder.display.note(
            f"{len(prompts)} rows, {len(missing)} to do. Results so far: {journal.path}"
        )
        recorder.display.begin(len(prompts), done=len(journal.results))
        work = answered if config.samples_answers else scored
        if config.samples_answers:
            say_engines_start(recorder, config, str(config.model.model_name_or_path))
        with work(config, tokenizer, missing, recorder.folder.logs) as groups:
            failed = keep(groups, journal, recorder)
        if journal.results:
            write_results(config, prompts, journal, recorder)
    if failed:
        first = f"The first, number {failed[0].prompt.index + 1} of the {len(prompts)}: {failed[0].error}"
        raise UserError(f"{len(failed)} rows failed: the same command tries them again. {first}")
    journal.finish()


def load_rows(config: BatchInferenceConfig) -> Table:
    """Load the rows of --data.dataset as they are stored. Raises DataError."""
    data = config.data
    return load_datasets(
        data.dataset,
        split=data.dataset_split,
        probs=data.dataset_probs,
        max_samples=data.max_samples,
        seed=config.train.seed,
    )


def start_of_request(
    config: BatchInferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Table,
    final: Path,
    request: str,
) -> FirstStart:
    """Return the first start of this request. If the final file belongs to another request, this
    one starts now.
    """
    begun = start_of_results(final)
    if not is_complete(final):
        return begun
    made = request_of(final)
    if made == "":  # by an older release, which recorded only the rendered rows
        with redirect_stderr(
            StringIO()
        ):  # the notices are printed when the rows are rendered for good
            _, identity = rendered_rows(config, deepcopy(tokenizer), rows, begun)
        if has_another_request(final, identity):
            return FirstStart.here()
    elif made is not None and made != request:
        return FirstStart.here()
    return begun


def rendered_rows(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, rows: Table, begun: FirstStart
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the prompts as rendered by a command that began at `begun`, and its identity. Raises
    DataError.
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
    """The prompts to answer, or whole texts to score; their format is recorded in the tokenizer.
    Raises DataError.

    `follows`: by default texts have the format that the model was trained with.
    """
    suffix = config.csft.suffix
    rows_of: Any = PromptDataset if config.samples_answers else AnsweredDataset
    model = f"{MODEL} {config.model.model_name_or_path}"
    if not config.samples_answers:
        model = f"--reward.model_name_or_path {config.reward.models[0]}"
    dataset: Any = prompts_of(
        config,
        rows_of,
        tokenizer,
        rows,
        model=model if follows else None,
        generates=config.samples_answers,
    )
    if config.samples_answers:
        look_at_prompts(
            config, dataset, tokenizer, policy=str(config.model.model_name_or_path), flag=MODEL
        )
        prompt_data.check_prompts(config, dataset)
    else:
        record(tokenizer, used := TextFormat.of(dataset.data, tokenizer))
        prompt_data.check_reward_formats(config, used, [dataset[0].text])
        notice(dataset.summary)
    size, number = config.rollout.batch_size, config.iter
    numbers = range(len(dataset))
    if number is not None:
        numbers = numbers[number * size : (number + 1) * size]
    if not numbers:
        raise DataError(
            f"--iter {number} begins behind the last of the {len(dataset)} rows of --data.dataset."
        )
    prompts: list[Prompt] = [replace(dataset[row], index=row) for row in numbers]
    if not suffix:
        return prompts
    asked = encode(tokenizer, [prompt.text + suffix for prompt in prompts])
    return [
        replace(p, text=p.text + suffix, tokens=e.tokens)
        for p, e in zip(prompts, asked, strict=True)
    ]


def show_rows(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> None:
    """Print the format and the first texts as the model will see them; a reward is read at the last
    token.
    """
    print(f"{len(prompts)} rows. {show_template(tokenizer)}")
    room = (
        settings.inference_sampling(config).prompt_room
        if config.samples_answers
        else config.data.max_len
    )
    for row in prompts[:SHOWN]:
        marks = [] if config.samples_answers else [*[None] * (len(row.tokens) - 1), ""]
        print(show_text(f"row {row.index + 1}", row.tokens[-room:], tokenizer, marks))


@contextmanager
def answered(
    config: BatchInferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    logs: Path,
) -> Iterator[Iterable[list[Trajectory]]]:
    """Engines that run within it, and the answers to these prompts, prompt by prompt as they
    finish.
    """
    path, size = str(config.model.model_name_or_path), config.rollout.batch_size
    request = Request(spec=settings.inference_sampling(config), step=0)
    with (
        engines(config, path, tokenizer, name="vllm", logs=logs) as fleet,
        closing(BackgroundLoop()) as loop,
    ):
        stream = RolloutGenerator(fleet, tokenizer, None).stream(
            prompts, request, groups=len(prompts), at_once=size
        )
        yield loop.iterate(stream, config.train.step_timeout)


@contextmanager
def scored(
    config: BatchInferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    logs: Path,
) -> Iterator[Iterable[list[Trajectory]]]:
    """Reward models that run within it, and these prompts and their answers as whole texts with
    rewards.
    """
    size = config.rollout.batch_size
    parts = (prompts[start : start + size] for start in range(0, len(prompts), size))
    texts = ([given_text(tokenizer, p.index, "", p.tokens) for p in part] for part in parts)
    with reward_models(config, logs=logs) as models:
        yield ([text] for part in texts for text in models.annotated(part))


def keep(
    groups: Iterable[list[Trajectory]], journal: Journal, recorder: Recorder
) -> list[Trajectory]:
    """Write down each row that finishes, and show the speed: sampled tokens, or tokens of texts
    that are scored.

    Returns a failed answer of each row that has one.
    """
    failed: list[Trajectory] = []
    display, tokens, began = recorder.display, 0, monotonic()
    noted = began
    for group in groups:
        failures = [t for t in group if t.failed]
        failed += failures[:1]
        if not failures:
            journal.add(
                group[0].prompt.index,
                [t.response_text if t.reward is None else t.reward for t in group],
            )
        tokens += sum(t.num_actions or len(t.tokens) for t in group if not t.failed)
        speed = (
            f"{tokens / max(monotonic() - began, 1e-9):,.0f} tokens/s, {len(failed)} rows failed"
        )
        display.status(speed, done=len(journal.results))
        if not display.live and monotonic() - noted >= NOTE_EVERY_S:
            noted = monotonic()
            display.note(f"{len(journal.results)} rows have results, {speed}.")
    return failed


def write_results(
    config: BatchInferenceConfig, prompts: Sequence[Prompt], journal: Journal, recorder: Recorder
) -> None:
    """Write the final file, in the order of the dataset. Raises DataError if it would be empty."""
    note = recorder.display.note
    results = [
        (prompt, journal.results[prompt.index])
        for prompt in prompts
        if prompt.index in journal.results
    ]
    if not config.samples_answers:
        lines = [
            {"input": prompt.text, "output": prompt.label, "reward": reward}
            for prompt, [reward] in results
        ]
        rewards, inputs = [row["reward"] for row in lines], len(by_input(lines))
        mean, deviation = fmean(rewards), stdev(rewards) if len(rewards) > 1 else 0.0
        recorder.log(0, {"eval/reward_mean": mean, "eval/reward_std": deviation})
        note(
            f"{len(rewards)} answers to {inputs} inputs: reward {mean:.4f} on average, deviation {deviation:.4f}"
        )
        lines = POST_PROCESSORS[config.post_processor](lines, config)
    else:
        lines = [
            {"input": prompt.text, "output": output}
            for prompt, outputs in results
            for output in outputs
        ]
    if not lines:
        raise DataError(
            f"There is no pair to write to {journal.final}: sample several answers with --best_of_n."
        )
    write_atomically(journal.final, map(json_line, lines))
    note(
        f"{len(lines)} lines are in {journal.final}. Inputs are whole prompts: train with --data.input_template {{}}."
    )
