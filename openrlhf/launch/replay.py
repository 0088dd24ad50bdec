"""Whether a run can be made again from the episodes in a folder, seen before any process starts."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.ppo import PPOConfig
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.errors import DataError
from openrlhf.launch import settings
from openrlhf.launch.prompt_data import PromptData
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.recorded import ReplayGenerator


def replay_folder(config: PPOConfig, data: PromptData, *, done: int, consumed: int) -> EpisodeFolder | None:
    """The folder of --rollout.replay_dir, if this run is a replay; it stands after step `done` and `consumed` prompts.

    Raises DataError where the folder has no episodes, misses a step, or was written by a run that took other prompts or
    samples. Of the files, the first lines are read, and all of the next step's.
    """
    if not config.rollout.replay_dir:
        return None
    folder = EpisodeFolder(config.rollout.replay_dir)
    flag, steps = f"--rollout.replay_dir {config.rollout.replay_dir}", folder.steps()
    if not steps:
        raise DataError(f"{flag} has no episodes (step-000001.jsonl.gz, …): write some with --rollout.dump_dir.")
    if missing := sorted(set(range(done + 1, steps[-1])) - set(steps)):
        raise DataError(
            f"{flag} has steps up to {steps[-1]}, but not step {missing[0]}: copy {folder.file('step', missing[0]).name} "
            "from where it was written."
        )
    now = identity(config, data)
    for step in (step for step in steps if step > done):
        then = folder.header("step", step)["run"]
        differing = [
            f"\n  {name}: {then.get(name)} there, {now.get(name)} here"
            for name in dict.fromkeys([*now, *then])
            if then.get(name) != now.get(name)
        ]
        if differing:
            raise DataError(
                f"{folder.file('step', step)} is of a run that took other prompts or samples than this one. Replay it with "
                f"what it was written with:{''.join(differing)}"
            )
    rest_of_pass = ResumableSampler(len(data.train), seed=config.train.seed, consumed=consumed, drop_last=False)
    rows = islice(rest_of_pass, config.rollout.batch_size)
    prompts = [data.train[row].drawn(place) for place, row in enumerate(rows, consumed)]
    ReplayGenerator(folder, lambda: done).rollout(prompts, settings.train_sampling(config))
    return folder


def identity(config: PPOConfig, data: PromptData) -> dict[str, Any]:
    """What decides which prompts the steps of a run take, and what their samples mean; as JSON has it."""
    algo = config.algo
    values = {
        "--rollout.batch_size": config.rollout.batch_size,
        "--rollout.n_samples_per_prompt": config.rollout.n_samples_per_prompt,
        "--rollout.temperature": config.rollout.temperature,
        "--rollout.max_new_tokens": config.rollout.max_new_tokens,
        "--data.max_len": config.data.max_len,
        "--train.seed": config.train.seed,
        "--algo.dynamic_filtering_range": algo.dynamic_filtering_range if algo.dynamic_filtering_enable else None,
        "prompts of --data.prompt_dataset": len(data.train),
        "vocabulary of --actor.model_name_or_path": vocabulary(data.tokenizer),
    }
    return json.loads(json.dumps(values))


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A name for which number means which token."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return f"{len(tokenizer)} tokens, {hashlib.sha256(tokens.encode()).hexdigest()[:8]}"
