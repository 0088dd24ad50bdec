"""A running RL command: models, user-code processes and trainer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, RunState
from openrlhf.checks import report
from openrlhf.cluster.worker_group import WorkerError, WorkerGroup, wait_for
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.trajectory import Trajectory
from openrlhf.launch import settings
from openrlhf.launch.agents import make_agents
from openrlhf.launch.beginning import record_plan
from openrlhf.launch.identity import episode_identity
from openrlhf.launch.processes import Processes
from openrlhf.launch.prompt_data import PromptData
from openrlhf.launch.stages import make_stages
from openrlhf.launch.workers import start_workers, worker_of
from openrlhf.observability.recorder import Recorder
from openrlhf.planning.plan import Plan
from openrlhf.rewards.protocol import Reward
from openrlhf.rewards.rule import reward_of
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine import EngineError
from openrlhf.rollout.engine_settings import engine_device
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.fleet import Fleet
from openrlhf.rollout.generator import Generator, RolloutGenerator, unchanged
from openrlhf.rollout.recorded import DumpingGenerator, ReplayGenerator
from openrlhf.trainers.async_source import AsyncSource
from openrlhf.trainers.engine_comparison import EngineComparison
from openrlhf.trainers.evaluation import Evaluate
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.ppo import PPOTrainer
from openrlhf.trainers.rollout_only import RolloutOnly
from openrlhf.trainers.sources import Source, SyncSource, evaluate
from openrlhf.trainers.stages import EarlyStages, Stage
from openrlhf.weights.publisher import WeightPublisher
from openrlhf.workers.base import TrainedWorker


@dataclass(eq=False, repr=False)
class Run:
    """A running RL command: its models, user-code processes and trainer.

    All parts of the command are closed when the `started` block exits.
    """

    config: PPOConfig
    data: PromptData
    start: RunState
    processes: Processes
    checkpoints: CheckpointManager
    checkpoint: Checkpoint | None
    replay: EpisodeFolder | None
    memory: Plan | None

    def __post_init__(self) -> None:
        resume_step = self.checkpoint.state.step if self.checkpoint else None
        self.recorder = Recorder(self.config, self.start.run_dir, resume_step=resume_step)
        record_plan(self.memory, self.recorder)
        self.log_dir = str(self.recorder.folder.logs)
        self.loop = BackgroundLoop("rollout-loop")
        self.fleet = self.processes.fleet
        self.reward: Reward | None = None

    @contextmanager
    def started(self) -> Iterator[dict[str, WorkerGroup]]:
        """Start the engines and models, and yield the models' worker groups by role.

        Raises a RolloutError that names the log files if an engine fails in the block.
        """
        with ExitStack() as self.ends:
            self.ends.callback(self.recorder.close)
            self.ends.callback(self.loop.close)
            # Close the loop and processes before writing the report.
            # Other jobs may be waiting for the devices.
            self.ends.callback(self.processes.close)
            if not self.replay:
                reward = reward_of(self.config.reward, log_dir=Path(self.log_dir))
                self.reward = self.ends.enter_context(reward)
            if self.fleet:
                self._start_engines(self.fleet)
            worker = partial(worker_of, self.config, len(self.data.train))
            groups = start_workers(self.config, self.processes.hosts, worker, log_dir=self.log_dir)
            self._check_room(groups)
            if not self.fleet:
                yield groups
                return
            self.fleet.wait()
            with self.fleet.naming_logs():
                yield groups

    def make_loop(self, groups: Mapping[str, WorkerGroup]) -> PPOTrainer | RolloutOnly:
        """Return the training loop, which continues from the checkpoint if there is one.

        With --rollout.only, return the loop that generates and scores samples without training.
        """
        generator = self._make_generator()
        stages = make_stages(self.config, groups)
        source = self._make_source(generator, stages.of_prompt)
        self.ends.callback(source.close)
        maker = ExperienceMaker(self.config, stages.of_batch)
        if self.config.rollout.only:
            return RolloutOnly(source, maker, self.recorder)
        trainer = PPOTrainer(
            source,
            maker,
            self._make_publisher(groups["actor"]),
            policy=groups["actor"],
            critic=groups.get("critic"),
            play=self._make_play(generator, stages.rewards),
            pretraining=self.data.pretraining,
            manager=self.checkpoints,
            tokenizer=self.data.tokenizer,
            recorder=self.recorder,
            hosts=self.processes.hosts,
            config=self.config,
            start=self.start,
        )
        if self.checkpoint:
            trainer.resume(self.checkpoint)
        return trainer

    def _start_engines(self, fleet: Fleet) -> None:
        """Start the engines, and wait for the engines that share devices with the models."""
        config = self.config
        policy = config.actor.model_name_or_path
        engine = settings.engine_settings(config, policy, engine_device(), self.data.tokenizer)
        engine = replace(engine, lora_rank=config.ds.lora.served_rank)
        fleet.start(engine, log_dir=self.log_dir, timeout_s=config.train.setup_timeout)
        if fleet.hosts:  # an engine allocates its memory before the models are loaded
            fleet.wait()

    def _check_room(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Print a notice if the disk is too small for all checkpoints.

        Raises CheckError if the disk is too small for a single checkpoint.
        """
        trained = [group for role, group in groups.items() if role in ("actor", "critic")]
        if not self.config.ckpt.resumable or not trained:
            return
        asked = [group.broadcast(TrainedWorker.checkpoint_bytes)[0] for group in trained]
        sizes = wait_for(
            asked, timeout_s=self.config.train.setup_timeout, doing="report their checkpoint size"
        )
        report(*self.checkpoints.check_room(sum(sizes)))

    def _make_publisher(self, policy: WorkerGroup) -> WeightPublisher:
        """Return the publisher of the policy's weights.

        Before the first step, the publisher compares the engines' log-probabilities with the
        policy's.
        """
        config = self.config
        timeout_s = config.train.publish_timeout
        publisher = WeightPublisher(
            policy,
            self.fleet,
            transport=settings.transport(config, engine_device()),
            timeout_s=timeout_s,
            update_timeout_s=config.train.step_timeout,
            wait_for=wait_for,
            failures=(WorkerError, EngineError),
        )
        if self.fleet is None:
            return publisher
        prompts = [self.data.train[0].tokens, self.data.train[-1].tokens]
        probe = settings.engine_probe(config, prompts)
        if probe:
            check = EngineComparison(
                policy=policy, fleet=self.fleet, probe=probe, timeout_s=timeout_s
            )
            publisher.check = check.run
        self.fleet.refit = publisher.refit
        self.fleet.say = self.recorder.display.note
        return publisher

    def _make_generator(self) -> Generator:
        """Return the episode generator.

        The generator combines the engines, the agents and the reward. With --rollout.dump_dir, the
        generator also writes the episodes to disk. With --rollout.replay_dir, the generator reads
        episodes from disk instead.
        """
        config = self.config
        if self.replay:
            return ReplayGenerator(self.replay)
        assert self.fleet
        agents = make_agents(config, self.data.tokenizer, log_dir=Path(self.log_dir))
        if agents:
            self.ends.callback(agents.close)
        generator = RolloutGenerator(
            self.fleet,
            self.data.tokenizer,
            self.reward,
            agents=agents,
            fallback=config.reward.fallback,
        )
        if not config.rollout.dump_dir:
            return generator
        folder = EpisodeFolder(config.rollout.dump_dir)
        folder.begin(after=self.checkpoint.state.step if self.checkpoint else -1)
        identity = episode_identity(config, self.data.train) | self.start.first_start.entries
        return DumpingGenerator(generator, folder, run=identity, required=config.rollout.only)

    def _make_source(self, generator: Generator, stages: Sequence[Stage]) -> Source:
        """Return the episode source, which runs `stages` on the samples of each prompt."""
        config = self.config
        score_group = unchanged
        if stages:
            early = EarlyStages(stages=stages, timeout_s=config.train.step_timeout)
            score_group = early.score_group
        prompts = self.data.train
        sampling = settings.train_sampling(config)
        if config.train.async_enable:
            return AsyncSource(
                prompts, generator, self.loop, sampling, config, score_group=score_group
            )
        last_step = self.replay.last_step if self.replay else None
        source = SyncSource(
            prompts,
            generator,
            self.loop,
            sampling,
            config,
            score_group=score_group,
            last_step=last_step,
        )
        if last_step is not None and last_step < source.total_steps:
            self.recorder.display.note(
                f"--rollout.replay_dir has episodes up to step {last_step}; the prompts would "
                f"allow {source.total_steps} steps."
            )
        return source

    def _make_play(self, generator: Generator, rewards: Stage) -> Evaluate | None:
        """Return the evaluation on held-out prompts, or None if there are no prompts or engines."""
        prompts = self.data.eval
        sampling = settings.eval_sampling(self.config)
        timeout_s = self.config.train.step_timeout
        if prompts is None or self.replay:
            return None
        scored = EarlyStages(stages=[rewards], timeout_s=timeout_s)

        def play(step: int) -> list[Trajectory]:
            episodes = evaluate(
                prompts, generator, self.loop, sampling, step=step, timeout_s=timeout_s
            )
            return scored.score(episodes)

        return play
