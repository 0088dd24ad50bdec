"""Checks the --rollout.replay_dir folder before models are loaded."""

from openrlhf.checkpoints.manifest import differences
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import FirstStart
from openrlhf.launch.identity import episode_identity
from openrlhf.launch.prompt_data import PromptData
from openrlhf.rollout.episode_files import EpisodeFolder


def start_of_episodes(config: PPOConfig) -> FirstStart:
    """Return the start time and text format of the run that recorded the episodes to replay.

    If there are no such episodes, return the start time and text format of this run.
    """
    if config.rollout.replay_dir:
        folder = EpisodeFolder(config.rollout.replay_dir)
        steps = folder.steps()
        if steps:
            return FirstStart.of(folder.header("step", steps[0])["run"])
    return FirstStart.here()


def replay_folder(config: PPOConfig, data: PromptData, *, done: int) -> EpisodeFolder | None:
    """Check the --rollout.replay_dir folder and return it, or return None if the flag is not set.

    The run has completed `done` steps. Reads the first line of each file and the complete file of
    the next step. Raises DataError if the folder has no episodes, lacks a step, or was written by a
    run with different prompts or samples.
    """
    if not config.rollout.replay_dir:
        return None
    folder = EpisodeFolder(config.rollout.replay_dir)
    flag = f"--rollout.replay_dir {config.rollout.replay_dir}"
    steps = folder.steps()
    if not steps:
        raise DataError(
            f"{flag} has no episodes (step-000001.jsonl.gz, …). "
            "Record episodes with --rollout.dump_dir first."
        )
    missing = set(range(done + 1, steps[-1])).difference(steps)
    if missing:
        step = min(missing)
        raise DataError(
            f"{flag} has steps up to {steps[-1]}, but not step {step}. "
            f"Copy {folder.file('step', step).name} from the original folder. If that run could "
            f"not write the file, replay a copy of the folder that ends before step {step}."
        )
    identity = episode_identity(config, data.train)
    remaining = [step for step in steps if step > done]
    for step in remaining:
        changed = differences(folder.header("step", step)["run"], identity)
        if changed:
            advice = "Replay the episodes with the settings of that run:"
            raise DataError(
                f"{folder.file('step', step)} was written by a run with different prompts or "
                "samples. " + "\n  ".join([advice, *changed])
            )
    for step in remaining[:1]:
        folder.read("step", step)
    return folder
