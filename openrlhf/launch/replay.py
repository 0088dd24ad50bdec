"""Checks, before a model is loaded, that a folder has the episodes that this run needs."""

import asyncio
from dataclasses import replace
from itertools import islice

from openrlhf.checkpoints.manifest import differences
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import FirstStart
from openrlhf.launch import settings
from openrlhf.launch.identity import episode_identity
from openrlhf.launch.prompt_data import PromptData
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.generator import Request
from openrlhf.rollout.recorded import ReplayGenerator


def start_of_episodes(config: PPOConfig) -> FirstStart:
    """Return the first start of the run that recorded the episodes of --rollout.replay_dir; of this
    run if there are none.
    """
    folder = EpisodeFolder(config.rollout.replay_dir or "")
    steps = folder.steps() if config.rollout.replay_dir else []
    return FirstStart.of(folder.header("step", steps[0])["run"]) if steps else FirstStart.here()


def replay_folder(
    config: PPOConfig, data: PromptData, *, done: int, consumed: int
) -> EpisodeFolder | None:
    """The folder of --rollout.replay_dir, or None. The run has done `done` steps and used
    `consumed` prompts.

    Raises DataError if the folder has no episodes, misses a step, or was written by a run with
    other prompts or samples. Only the first line of each file and the file of the next step are
    read.
    """
    if not config.rollout.replay_dir:
        return None
    folder = EpisodeFolder(config.rollout.replay_dir)
    flag, steps = f"--rollout.replay_dir {config.rollout.replay_dir}", folder.steps()
    if not steps:
        raise DataError(
            f"{flag} has no episodes (step-000001.jsonl.gz, …): write some with --rollout.dump_dir."
        )
    if missing := sorted(set(range(done + 1, steps[-1])) - set(steps)):
        raise DataError(
            f"{flag} has steps up to {steps[-1]}, but not step {missing[0]}: copy "
            f"{folder.file('step', missing[0]).name} from the original folder."
        )
    now = episode_identity(config, data.train)
    for step in (step for step in steps if step > done):
        if different := differences(folder.header("step", step)["run"], now):
            raise DataError(
                f"{folder.file('step', step)} was written by a run with other prompts or samples. Replay it with the "
                "settings of that run:" + "".join(f"\n  {difference}" for difference in different)
            )
    rest_of_epoch = ResumableSampler(
        len(data.train), seed=config.train.seed, consumed=consumed, drop_last=False
    )
    rows = islice(rest_of_epoch, config.rollout.batch_size)
    prompts = [replace(data.train[row], index=place) for place, row in enumerate(rows, consumed)]
    request = Request(spec=settings.train_sampling(config), step=done + 1)

    async def read() -> None:
        async for _ in ReplayGenerator(folder).stream(prompts, request, groups=len(prompts)):
            pass  # raises for samples of other prompts

    asyncio.run(read())
    return folder
