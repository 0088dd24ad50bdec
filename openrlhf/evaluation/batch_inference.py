"""`openrlhf batch_inference`: answers to all prompts of a dataset, or the rewards of answers, in a file."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import UserError, value_at
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.data.errors import DataError
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.templates import Passage, cut, encode
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.distributed.cluster import ray_cluster
from openrlhf.distributed.placement import Placement, engine_group
from openrlhf.evaluation.comparing import given_text
from openrlhf.evaluation.journal import Journal
from openrlhf.evaluation.post_processing import POST_PROCESSORS, by_input
from openrlhf.evaluation.runs import engines, reward_hosts, reward_models
from openrlhf.files import write_atomically
from openrlhf.launch import settings
from openrlhf.launch.identity import FLAGS, Identity, of_model, of_rows
from openrlhf.launch.prompt_data import check_reward_models, look_at_prompts, policy_tokenizer, read_prompts
from openrlhf.observability.display import Display
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import json_line
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import Device, engine_device
from openrlhf.rollout.generator import Request, RolloutGenerator
from openrlhf.trajectory import Prompt, Trajectory


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Answer or score all rows that have no result yet, and write the file. Raises UserError if a row failed."""
    check_engine_args(config.vllm.engine_args, kind := engine_device())
    work = read_work(config)
    if config.dry_run:
        return print(f"{len(work.rows)} rows, the first: {work.text(work.rows[0])!r}")
    with (
        closing(Journal(Path(config.output_path).expanduser(), work.identity())) as journal,
        closing(Recorder(config, config.run.dir)) as recorder,
    ):
        missing, failed = [row for row in work.rows if row not in journal.results], list[Trajectory]()
        recorder.display.note(f"{len(work.rows)} rows, {len(missing)} to do. Results so far: {journal.path}")
        recorder.display.begin(len(work.rows), done=len(journal.results))
        if missing:
            group = reward_hosts(config) if config.scores else engine_group(config.vllm, "vllm")
            with ray_cluster(Placement(groups=(group,), on_gpus=kind == "cuda")):
                do = scored if config.scores else answered
                failed = keep(
                    do(work, missing, kind, str(recorder.folder.logs.absolute())),
                    journal,
                    recorder.display,
                    config.rollout.batch_size,
                )
        if journal.results:
            write_results(work, journal, recorder)
        if failed:
            raise UserError(
                f"{len(failed)} rows failed and are not in {journal.final}: the same command tries them again. The first, "
                f"row {failed[0].prompt.index + 1}: {failed[0].error}"
            )
        journal.path.unlink()


@dataclass(frozen=True, kw_only=True)
class Work:
    """The rows of a command: prompts to answer, or prompts whose labels are the outputs to score."""

    config: BatchInferenceConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    rows: range

    def prompt(self, row: int) -> Prompt:
        """A prompt; with --csft.enable it asks for a reward."""
        prompt, suffix = self.prompts[row], self.config.csft.suffix
        if not suffix:
            return prompt
        [encoded] = encode(self.tokenizer, [prompt.text + suffix])
        return replace(prompt, text=prompt.text + suffix, tokens=encoded.tokens)

    def text(self, row: int) -> str:
        """Prompt, and output if there is one."""
        prompt = self.prompt(row)
        return f"{prompt.text}{prompt.label}"

    def whole(self, row: int) -> Trajectory:
        """Prompt and output as one text, ended and cut as in the training of a reward model."""
        passage = Passage(text=self.text(row), spans=[], response=0).closed(str(self.tokenizer.eos_token))
        [encoded] = encode(self.tokenizer, [passage.text])
        return given_text(self.tokenizer, row, "", cut(encoded.tokens, self.config.data.max_len, self.tokenizer))

    def identity(self) -> Identity:
        """Everything that decides the results."""
        config = self.config
        models = config.reward.models if config.scores else [str(config.model.model_name_or_path)]
        return {
            **{f"--{flag}": value_at(config, flag) for flag in FLAGS["inference"]},
            "models": [of_model(path, trust_remote_code=config.model.trust_remote_code) for path in models],
            "rows of --data.dataset, rendered": of_rows(len(self.rows), lambda place: self.text(self.rows[place])),
        }


def read_work(config: BatchInferenceConfig) -> Work:
    """The rows that the flags name, checked together with the models. Raises DataError or ModelError."""
    data, size, path = config.data, config.rollout.batch_size, str(config.model.model_name_or_path)
    if config.scores:
        path = config.reward.models[0]
        tokenizer = get_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        check_reward_models(config, tokenizer, policy=f"the first, {path}")
    else:
        tokenizer = policy_tokenizer(config, path, flag="--model.model_name_or_path")
    split, probs, most = data.dataset_split, data.dataset_probs, data.max_samples
    prompts = read_prompts(config, tokenizer, data.dataset, split=split, probs=probs, max_samples=most)
    first = (config.iter or 0) * size
    rows = range(len(prompts))[first : None if config.iter is None else first + size]
    if not rows:
        raise DataError(f"--iter {config.iter} begins at row {first + 1} of --data.dataset, which has {len(prompts)}.")
    if not config.scores:
        look_at_prompts(config, prompts, tokenizer, policy=path, flag="--model.model_name_or_path")
    column = prompts.data.label_key
    if config.scores and (wrong := [row for row in rows if not (column and isinstance(prompts[row].label, str))]):
        raise DataError(f"--data.dataset, row {wrong[0] + 1}: --data.output_key {column} names no text to score.")
    return Work(config=config, tokenizer=tokenizer, prompts=prompts, rows=rows)


def answered(work: Work, rows: list[int], kind: Device, log_dir: str) -> Iterator[list[Trajectory]]:
    """The answers to the prompts of these rows, row by row as they finish."""
    config, tokenizer, path = work.config, work.tokenizer, str(work.config.model.model_name_or_path)
    request = Request(spec=settings.inference_sampling(config, samples=config.best_of_n), step=0)
    with (
        engines(config, path, tokenizer, kind, name="vllm", log_dir=log_dir) as fleet,
        closing(BackgroundLoop()) as loop,
    ):
        prompts, at_once = map(work.prompt, rows), config.rollout.batch_size
        stream = RolloutGenerator(fleet, tokenizer, None).stream(prompts, request, groups=len(rows), at_once=at_once)
        yield from loop.iterate(stream, config.train.step_timeout)


def scored(work: Work, rows: list[int], kind: Device, log_dir: str) -> Iterator[list[Trajectory]]:
    """The texts of these rows with their rewards, row by row."""
    size = work.config.rollout.batch_size
    with reward_models(work.config, kind, log_dir=log_dir) as models:
        for start in range(0, len(rows), size):
            yield from ([text] for text in models.annotated([work.whole(row) for row in rows[start : start + size]]))


def keep(groups: Iterable[list[Trajectory]], journal: Journal, display: Display, every: int) -> list[Trajectory]:
    """Write down each row that finishes. Returns a failed answer of each row that has one."""
    failed: list[Trajectory] = []
    for number, group in enumerate(groups, 1):
        failures = [t for t in group if t.failed]
        failed += failures[:1]
        if not failures:
            journal.add(group[0].prompt.index, [t.response_text if t.reward is None else t.reward for t in group])
        display.status(f"{len(failed)} rows failed", done=len(journal.results))
        if number % every == 0:
            display.note(f"{len(journal.results)} rows have results, {len(failed)} failed.")
    return failed


def write_results(work: Work, journal: Journal, recorder: Recorder) -> None:
    """Write the final file, in the order of the dataset. Raises DataError if it would be empty."""
    process, note = POST_PROCESSORS.get(work.config.post_processor), recorder.display.note
    results = [(work.prompt(row), journal.results[row]) for row in work.rows if row in journal.results]
    if work.config.scores:
        scores = [{"input": prompt.text, "output": prompt.label, "reward": reward} for prompt, [reward] in results]
        lines, rewards = process(scores, work.config) if process else scores, [row["reward"] for row in scores]
        mean, deviation = fmean(rewards), stdev(rewards) if len(rewards) > 1 else 0.0
        recorder.log(0, {"eval/reward_mean": mean, "eval/reward_std": deviation})
        inputs = len(by_input(scores))
        note(f"{len(rewards)} answers to {inputs} inputs: reward {mean:.4f} on average, deviation {deviation:.4f}")
    else:
        lines = [{"input": prompt.text, "output": output} for prompt, outputs in results for output in outputs]
    if not lines:
        raise DataError(f"There is no pair to write to {journal.final}: sample several answers with --best_of_n.")
    write_atomically(journal.final, *map(json_line, lines))
    note(f"{len(lines)} lines are in {journal.final}. Prompts are whole: train with --data.input_template {{}}.")
