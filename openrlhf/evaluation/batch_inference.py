"""`openrlhf batch_inference`: answers to all prompts of a dataset, or the rewards of answers, in a file."""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import UserError, value_at
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.data.errors import DataError, check_columns, text_of
from openrlhf.data.loading import key_columns, load_datasets
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
from openrlhf.launch.identity import of_model, of_rows
from openrlhf.launch.prompt_data import check_reward_models, look_at_prompts, policy_tokenizer
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import json_line
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import Device, engine_device
from openrlhf.rollout.generator import Request, RolloutGenerator
from openrlhf.trajectory import Prompt, Trajectory

# The flags that decide a result, besides the model and the rows.
SCORES = "task data.max_len reward.normalize_enable reward.weights"
ANSWERS = (
    "task data.max_len best_of_n train.seed rollout.max_new_tokens rollout.temperature rollout.top_p rollout.top_k "
    "rollout.repetition_penalty rollout.stop rollout.stop_token_ids"
)


def run_batch_inference(config: BatchInferenceConfig) -> None:
    """Answer or score all rows that have no result yet, and write the file. Raises UserError if a row failed."""
    check_engine_args(config.vllm.engine_args, kind := engine_device())
    work = Work.of(config)
    if config.dry_run:
        return print(f"{len(work.prompts)} rows, the first: {''.join(work.contents(0))!r}")
    with (
        closing(Journal(Path(config.output_path).expanduser(), work.identity())) as journal,
        closing(Recorder(config, config.run.dir)) as recorder,
    ):
        missing = [row for row in range(len(work.prompts)) if row not in journal.results]
        recorder.display.note(f"{len(work.prompts)} rows, {len(missing)} to do. Results so far: {journal.path}")
        failed: list[Trajectory] = []
        if missing:
            group = reward_hosts(config) if config.scores else engine_group(config.vllm, "vllm")
            with ray_cluster(Placement(groups=(group,), on_gpus=kind == "cuda")):
                do = scored if config.scores else answered
                failed = keep(work, do(work, missing, kind, str(recorder.folder.logs.absolute())), journal, recorder)
        write_results(work, journal, recorder)
        if failed:
            raise UserError(
                f"{len(failed)} rows failed and are not in {journal.final}: the same command tries them again. The first, "
                f"row {failed[0].prompt.index + 1}: {failed[0].error}"
            )
        journal.path.unlink()


@dataclass(frozen=True, kw_only=True)
class Work:
    """The rows of a command: prompts to answer, or prompts with the outputs to score."""

    config: BatchInferenceConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset
    outputs: list[str]  # empty if there are none to score

    @classmethod
    def of(cls, config: BatchInferenceConfig) -> "Work":
        """The rows that the flags name, checked together with the models. Raises DataError or ModelError."""
        data, size, flag = config.data, config.rollout.batch_size, "--model.model_name_or_path"
        model = config.reward.models[0] if config.scores else str(config.model.model_name_or_path)
        if config.scores:
            tokenizer = get_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
            check_reward_models(config, tokenizer, policy=f"the first, {model}")
        else:
            tokenizer = policy_tokenizer(config, model, flag=flag)
        split, probs, seed = data.dataset_split, data.dataset_probs, config.train.seed
        most, text = data.max_samples, key_columns(data)
        rows = load_datasets(data.dataset, split=split, probs=probs, max_samples=most, seed=seed, text=text)
        if config.iter is not None:
            if (first := config.iter * size) >= len(rows):
                raise DataError(
                    f"--iter {config.iter} begins at row {first + 1} of --data.dataset, which has {len(rows)}."
                )
            rows = rows.select(range(first, min(first + size, len(rows))))
        if config.scores:
            check_columns(rows.column_names, {"--data.output_key": data.output_key})
        outputs = [text_of(row, data.output_key) for row in map(dict[str, Any], rows)] if config.scores else []
        prompts = PromptDataset(rows, tokenizer, data)
        if not config.scores:
            look_at_prompts(config, prompts, tokenizer, policy=model, flag=flag)
        return cls(config=config, tokenizer=tokenizer, prompts=prompts, outputs=outputs)

    def prompt(self, row: int) -> Prompt:
        """A prompt; with --csft.enable it asks for a reward, as the default of --reward_template puts it in training."""
        prompt, csft = self.prompts[row], self.config.csft
        if not csft.enable or self.outputs:
            return prompt
        text = f"{prompt.text} {csft.prompt.strip()} "
        return replace(prompt, text=text, tokens=encode(self.tokenizer, [text])[0].tokens)

    def contents(self, row: int) -> list[str]:
        """The texts of a row."""
        return [self.prompt(row).text, *self.outputs[row : row + 1]]

    def whole(self, row: int) -> Trajectory:
        """Prompt and output as one text, ended and cut as in the training of a reward model."""
        passage = Passage(text="".join(self.contents(row)), spans=[], response=0).closed(str(self.tokenizer.eos_token))
        [encoded] = encode(self.tokenizer, [passage.text])
        return given_text(self.tokenizer, row, "", cut(encoded.tokens, self.config.data.max_len, self.tokenizer))

    def identity(self) -> dict[str, Any]:
        """Everything that decides the results."""
        config, scores = self.config, self.config.scores
        models = config.reward.models if scores else [str(config.model.model_name_or_path)]
        flags = (SCORES if scores else ANSWERS).split()
        return {
            **{f"--{flag}": value_at(config, flag) for flag in flags},
            "models": [of_model(path, trust_remote_code=config.model.trust_remote_code) for path in models],
            "rows of --data.dataset, rendered": of_rows(len(self.prompts), self.contents),
        }


def answered(work: Work, rows: list[int], kind: Device, log_dir: str) -> Iterator[list[Trajectory]]:
    """The answers to the prompts of these rows, row by row as they finish."""
    config, tokenizer, path = work.config, work.tokenizer, str(work.config.model.model_name_or_path)
    request = Request(spec=settings.inference_sampling(config), step=0)
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


def keep(work: Work, groups: Iterable[list[Trajectory]], journal: Journal, recorder: Recorder) -> list[Trajectory]:
    """Write down each row that finishes. Returns a failed answer of each row that has one."""
    failed: list[Trajectory] = []
    tokens, began = 0, time.monotonic()
    recorder.display.begin(len(work.prompts), done=len(journal.results))
    for group in groups:
        failures = [t for t in group if t.failed]
        failed += failures[:1]
        if not failures:
            journal.add(group[0].prompt.index, [t.response_text if t.reward is None else t.reward for t in group])
        tokens += sum(t.num_actions or len(t.tokens) for t in group)
        rate = tokens / (time.monotonic() - began)
        recorder.display.progress(len(journal.results), f"{rate:,.0f} tokens/s, {len(failed)} rows failed")
    return failed


def write_results(work: Work, journal: Journal, recorder: Recorder) -> None:
    """Write the final file, in the order of the dataset. Raises DataError if it would be empty."""
    config, display, results = work.config, recorder.display, sorted(journal.results.items())
    lines = [{"input": work.prompt(row).text, "output": output} for row, result in results for output in result]
    if config.scores:
        lines = [
            {"input": work.prompt(row).text, "output": work.outputs[row], "reward": reward} for row, [reward] in results
        ]
        rewards, inputs = [reward for _, [reward] in results], len(by_input(lines))
        mean, deviation = fmean(rewards), stdev(rewards) if len(rewards) > 1 else 0.0
        recorder.log(0, {"eval/reward_mean": mean, "eval/reward_std": deviation})
        display.note(
            f"{len(lines)} answers to {inputs} inputs: reward {mean:.4f} on average, deviation {deviation:.4f}"
        )
        lines = POST_PROCESSORS[config.post_processor](lines, config)
        if config.post_processor == "iter_dpo":
            display.note(f"{inputs - len(lines)} of {inputs} inputs make no pair, because all their rewards are equal.")
    if not lines:
        raise DataError(
            f"There is nothing to write to {journal.final}. For pairs, sample several answers: --best_of_n."
        )
    write_atomically(journal.final, *map(json_line, lines))
    display.note(f"{len(lines)} lines are in {journal.final}")
