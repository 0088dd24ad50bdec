"""`openrlhf batch_inference`: answers to all prompts of a dataset, or the rewards of answers, in a file."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import UserError
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.data.errors import DataError
from openrlhf.data.templates import Passage, cut, encode
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.evaluation.comparing import given_text
from openrlhf.evaluation.journal import Journal
from openrlhf.evaluation.post_processing import POST_PROCESSORS, by_input
from openrlhf.evaluation.runs import engines, reward_models, started
from openrlhf.files import write_atomically
from openrlhf.launch import settings
from openrlhf.launch.identity import inference_identity
from openrlhf.launch.prompt_data import check_reward_models, look_at_prompts, policy_tokenizer, read_prompts
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import json_line
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import engine_device
from openrlhf.rollout.generator import Request, RolloutGenerator
from openrlhf.trajectory import Prompt, Trajectory


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Answer or score all rows that have no result yet, and write the file. Raises UserError if a row failed."""
    check_engine_args(config.vllm.engine_args, engine_device())
    tokenizer = read_tokenizer(config)
    prompts = read_rows(config, tokenizer)
    if config.dry_run:
        return print(f"{len(prompts)} rows, the first: {prompts[0].text + prompts[0].label!r}")
    journal = Journal(Path(config.output_path).expanduser(), inference_identity(config, prompts))
    with started(config) as recorder:
        missing = [prompt for prompt in prompts if prompt.index not in journal.results]
        recorder.display.note(f"{len(prompts)} rows, {len(missing)} to do. Results so far: {journal.path}")
        recorder.display.begin(len(prompts), done=len(journal.results))
        work = scored if config.scores else answered
        groups = work(config, tokenizer, missing, recorder.folder.logs)
        failed = keep(groups, journal, recorder, every=config.rollout.batch_size)
        if journal.results:
            write_results(config, prompts, journal, recorder)
    if failed:
        raise UserError(
            f"{len(failed)} rows failed and are not in {journal.final}: the same command tries them again. The first, "
            f"row {failed[0].prompt.index + 1}: {failed[0].error}"
        )
    journal.path.unlink()


def read_tokenizer(config: BatchInferenceConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that answers or scores; the models are checked. Raises DataError or ModelError."""
    if not config.scores:
        return policy_tokenizer(config, str(config.model.model_name_or_path), flag="--model.model_name_or_path")
    path = config.reward.models[0]
    tokenizer = get_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    check_reward_models(config, tokenizer, policy=f"the first, {path}")
    return tokenizer


def read_rows(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts to answer, or those whose labels are the answers to score. Raises DataError."""
    data, suffix = config.data, config.csft.suffix
    split, probs, most = data.dataset_split, data.dataset_probs, data.max_samples
    dataset = read_prompts(config, tokenizer, data.dataset, split=split, probs=probs, max_samples=most)
    size, number = config.rollout.batch_size, config.iter
    rows = range(len(dataset)) if number is None else range(len(dataset))[number * size : (number + 1) * size]
    if not rows:
        raise DataError(f"--iter {number} begins behind the last of the {len(dataset)} rows of --data.dataset.")
    prompts = [dataset[row] for row in rows]
    if not config.scores:
        path = str(config.model.model_name_or_path)
        look_at_prompts(config, dataset, tokenizer, policy=path, flag="--model.model_name_or_path")
    elif wrong := [p for p in prompts if not (dataset.data.label_key and isinstance(p.label, str))]:
        raise DataError(f"--data.dataset, row {wrong[0].index + 1}: --data.output_key names no text to score.")
    if not suffix:
        return prompts
    asked = encode(tokenizer, [prompt.text + suffix for prompt in prompts])
    return [replace(p, text=p.text + suffix, tokens=e.tokens) for p, e in zip(prompts, asked, strict=True)]


def answered(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], logs: Path
) -> Iterator[list[Trajectory]]:
    """The answers to these prompts, prompt by prompt as they finish."""
    path, size = str(config.model.model_name_or_path), config.rollout.batch_size
    request = Request(spec=settings.inference_sampling(config), step=0)
    with engines(config, path, tokenizer, name="vllm", logs=logs) as fleet, closing(BackgroundLoop()) as loop:
        stream = RolloutGenerator(fleet, tokenizer, None).stream(prompts, request, groups=len(prompts), at_once=size)
        yield from loop.iterate(stream, config.train.step_timeout)


def scored(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], logs: Path
) -> Iterator[list[Trajectory]]:
    """These prompts and their answers as whole texts with rewards, ended and cut as in the training of a reward model."""
    size, end = config.rollout.batch_size, str(tokenizer.eos_token)
    with reward_models(config, logs=logs) as models:
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            whole = [Passage(text=p.text + p.label, spans=[], response=0).closed(end).text for p in part]
            tokens = [cut(text.tokens, config.data.max_len, tokenizer) for text in encode(tokenizer, whole)]
            texts = [given_text(tokenizer, p.index, "", ids) for p, ids in zip(part, tokens, strict=True)]
            yield from ([text] for text in models.annotated(texts))


def keep(groups: Iterable[list[Trajectory]], journal: Journal, recorder: Recorder, *, every: int) -> list[Trajectory]:
    """Write down each row that finishes. Returns a failed answer of each row that has one."""
    failed: list[Trajectory] = []
    for number, group in enumerate(groups, 1):
        failures = [t for t in group if t.failed]
        failed += failures[:1]
        if not failures:
            journal.add(group[0].prompt.index, [t.response_text if t.reward is None else t.reward for t in group])
        recorder.display.status(f"{len(failed)} rows failed", done=len(journal.results))
        if number % every == 0:
            recorder.display.note(f"{len(journal.results)} rows have results, {len(failed)} failed.")
    return failed


def write_results(
    config: BatchInferenceConfig, prompts: Sequence[Prompt], journal: Journal, recorder: Recorder
) -> None:
    """Write the final file, in the order of the dataset. Raises DataError if it would be empty."""
    note = recorder.display.note
    results = [(prompt, journal.results[prompt.index]) for prompt in prompts if prompt.index in journal.results]
    if config.scores:
        lines = [{"input": prompt.text, "output": prompt.label, "reward": reward} for prompt, [reward] in results]
        rewards, inputs = [row["reward"] for row in lines], len(by_input(lines))
        mean, deviation = fmean(rewards), stdev(rewards) if len(rewards) > 1 else 0.0
        recorder.log(0, {"eval/reward_mean": mean, "eval/reward_std": deviation})
        note(f"{len(rewards)} answers to {inputs} inputs: reward {mean:.4f} on average, deviation {deviation:.4f}")
        lines = POST_PROCESSORS[config.post_processor](lines, config)
    else:
        lines = [{"input": prompt.text, "output": output} for prompt, outputs in results for output in outputs]
    if not lines:
        raise DataError(f"There is no pair to write to {journal.final}: sample several answers with --best_of_n.")
    write_atomically(journal.final, *map(json_line, lines))
    note(f"{len(lines)} lines are in {journal.final}. Inputs are whole prompts: train with --data.input_template {{}}.")
