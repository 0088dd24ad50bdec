"""Engines and reward models of non-training commands, which take turns on the devices."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic

from transformers import PreTrainedTokenizerBase

from openrlhf.cluster.placement import HostGroup, Placement, engine_group
from openrlhf.cluster.ray_cluster import places_now, ray_cluster
from openrlhf.cluster.worker_group import WorkerGroup
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.launch import settings
from openrlhf.launch.processes import make_hosts
from openrlhf.launch.ray_loss import RayLoss
from openrlhf.launch.workers import start_workers
from openrlhf.models.weights import require_finite_files
from openrlhf.observability.display import Display
from openrlhf.observability.recorder import Recorder
from openrlhf.rollout.engine_settings import engine_device
from openrlhf.rollout.fleet import Fleet
from openrlhf.trainers.stages import EarlyStages, RewardStage
from openrlhf.workers.frozen import RewardWorker

NOTE_INTERVAL_S = 30.0  # interval between progress notes if the display has no progress bar


@contextmanager
def recorded_run(config: EvaluationConfig | BatchInferenceConfig) -> Iterator[Recorder]:
    """Open a run folder and a Ray cluster (running or new) until the block exits.

    Yields the run folder's recorder.
    """
    loss = RayLoss()
    with (
        closing(Recorder(config, config.run.dir)) as recorder,
        loss.closing(recorder.close),
        ray_cluster(largest_phase(config), loss),
    ):
        yield recorder
        loss.finished = True


@contextmanager
def engines(
    config: settings.SamplingCommand,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    recorder: Recorder,
) -> Iterator[Fleet]:
    """Run a model's engines until the block exits.

    Announces the start, because engines print nothing until they are ready. Raises ModelError if a
    weight is NaN or infinite.
    """
    logs = recorder.folder.logs
    recorder.display.status("starting engines")
    recorder.display.note(f"Starting {config.vllm.num_engines} engine(s) for {path}; logs: {logs}")
    require_finite_files(path)  # vLLM does not check the weights that it loads
    group = engine_group(config.vllm, name)
    plan = exclusive(group)
    engine_settings = settings.engine_settings(config, path, engine_device(), tokenizer)
    with (
        closing(Fleet(group, places_now(plan)[name], on_gpus=plan.on_gpus)) as fleet,
        fleet.naming_logs(),
    ):
        fleet.start(engine_settings, log_dir=str(logs), timeout_s=config.train.setup_timeout)
        fleet.wait()
        yield fleet
        fleet.stop()


@contextmanager
def reward_models(config: settings.SamplingCommand, *, logs: Path) -> Iterator[EarlyStages]:
    """Run the reward models, if there are any, until the block exits.

    Yields the stage that combines their rewards with the reward function's rewards.
    """
    groups: dict[str, WorkerGroup] = {}
    with ExitStack() as ends:
        if config.reward.models:
            group = reward_hosts(config)
            plan = exclusive(group)
            machines = places_now(plan)[group.name]
            hosts = make_hosts(group, machines, config.ds, on_gpus=plan.on_gpus)
            ends.callback(hosts.close)
            worker = (RewardWorker, settings.reward_settings(config))
            groups = start_workers(config, [hosts], lambda role: worker, log_dir=str(logs))
        rewards = RewardStage(by=groups.get("reward"), reward=config.reward)
        yield EarlyStages(stages=[rewards], timeout_s=config.train.step_timeout)


def exclusive(group: HostGroup) -> Placement:
    """Return a placement that gives a group all devices."""
    return Placement(groups=(group,), on_gpus=engine_device() == "cuda")


def largest_phase(config: EvaluationConfig | BatchInferenceConfig) -> Placement:
    """Return the placement that takes more slots: the engines' or the reward models'."""
    phases: list[HostGroup] = []
    if config.samples_answers:
        phases.append(engine_group(config.vllm, "vllm"))
    if config.reward.models:
        phases.append(reward_hosts(config))
    return exclusive(max(phases, key=lambda group: group.slots))


def reward_hosts(config: settings.SamplingCommand) -> HostGroup:
    """Return the host group of the reward models."""
    reward = config.reward
    return HostGroup(
        name="reward",
        roles=("reward",),
        processes=reward.num_nodes * reward.num_gpus_per_node,
        per_machine=reward.num_gpus_per_node,
    )


class Progress:
    """Progress display: text beside the progress bar, or a note every NOTE_INTERVAL_S seconds."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self._last_note = monotonic()

    def show(self, text: str, *, done: int | None = None) -> None:
        """Show the text beside the bar, or print it if a note is due. `done` advances the bar."""
        self.display.status(text, done=done)
        if not self.display.live and monotonic() - self._last_note >= NOTE_INTERVAL_S:
            self._last_note = monotonic()
            self.display.note(f"{text}.")
