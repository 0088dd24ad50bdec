"""A run in its processes: models, processes of user code and trainer, and the end of all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, RunState
from openrlhf.cluster.worker_group import WorkerGroup, gather
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.batches import Experience
from openrlhf.core.trajectory import Trajectory
from openrlhf.launch import settings
from openrlhf.launch.agents import make_agents
from openrlhf.launch.identity import episode_identity
from openrlhf.launch.processes import Processes, connect_hosts
from openrlhf.launch.prompt_data import PromptData
from openrlhf.observability.recorder import Recorder
from openrlhf.rewards.protocol import Reward
from openrlhf.rewards.rule import reward_of
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_settings import Device
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.generator import Generator, RolloutGenerator, as_sampled
from openrlhf.rollout.recorded import DumpingGenerator, ReplayGenerator
from openrlhf.trainers.async_source import AsyncSource
from openrlhf.trainers.best import BestMetric
from openrlhf.trainers.checkpointing import Checkpointing
from openrlhf.trainers.clock import Clock
from openrlhf.trainers.evaluation import Evaluate, Evaluation
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.exporting import Exporting
from openrlhf.trainers.model_update import ModelUpdate
from openrlhf.trainers.ppo import PPOTrainer
from openrlhf.trainers.publisher import WeightPublisher
from openrlhf.trainers.rollout_only import RolloutOnly
from openrlhf.trainers.sources import SyncSource, evaluate
from openrlhf.trainers.stages import EarlyStages, RewardModels, Stage
from openrlhf.workers.base import RoleSettings, TrainedWorker
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker, RewardWorker
from openrlhf.workers.policy import PolicyWorker


@dataclass(eq=False, repr=False)
class Run:
    """A run in its processes: models, processes of user code, trainer. The end of `started` ends
    everything.
    """

    config: PPOConfig
    data: PromptData
    start: RunState
    kind: Device
    processes: Processes
    checkpoints: CheckpointManager
    checkpoint: Checkpoint | None
    replay: EpisodeFolder | None

    def __post_init__(self) -> None:
        state = self.checkpoint.state if self.checkpoint else None
        self.recorder = Recorder(
            self.config, self.start.run_dir, resume_step=state.step if state else None
        )
        self.log_dir = str(self.recorder.folder.logs.absolute())
        self.loop = BackgroundLoop()
        self.fleet = self.processes.fleet
        self.reward: Reward | None = None

    @contextmanager
    def started(self) -> Iterator[PPOTrainer | RolloutOnly]:
        """Within it, the run is in its processes. An engine's failure becomes a RolloutError that
        names the logs.
        """
        with ExitStack() as self.ends:
            self.ends.callback(self.recorder.close)
            self.ends.callback(self.loop.close)
            self.ends.callback(
                self.processes.close
            )  # before the report: others may wait for the devices
            if not self.replay:
                self.reward = self.ends.enter_context(
                    reward_of(self.config.reward, log_dir=Path(self.log_dir))
                )
            if self.fleet:
                policy = self.config.actor.model_name_or_path
                engine = settings.engine_settings(
                    self.config, policy, self.kind, self.data.tokenizer
                )
                engine = replace(engine, lora_rank=self.config.ds.lora.served_rank)
                self.fleet.start(
                    engine, log_dir=self.log_dir, timeout_s=self.config.train.setup_timeout
                )
                if self.fleet.hosts:  # an engine takes its memory while the models are not there
                    self.fleet.wait()
            groups = self._start_workers()
            self._check_room(groups)
            if self.fleet:
                self.fleet.wait()
            trainer = self._make_trainer(groups)
            if self.checkpoint and isinstance(trainer, PPOTrainer):
                trainer.resume(self.checkpoint)
            with self.fleet.naming_logs() if self.fleet else nullcontext():
                yield trainer

    def _start_workers(self) -> dict[str, WorkerGroup]:
        """Connect the processes of every host group, and load the models of all roles. Returns the
        groups by role.
        """
        config, prompts = self.config, len(self.data.train)
        for hosts in self.processes.hosts:
            connect_hosts(config, hosts, log_dir=self.log_dir)
        policy, critic = config.actor.model_name_or_path, config.critic.model_name_or_path or ""
        teacher = config.local_teacher or ""
        policy_steps = settings.optimizer_steps(config, prompts, after=config.frozen_steps)
        critic_steps = settings.optimizer_steps(config, prompts)
        workers: dict[str, tuple[type, Any]] = {
            "actor": (PolicyWorker, settings.trained_settings(config, policy, policy_steps)),
            "ref": (
                ReferenceWorker,
                RoleSettings(config=config, load=settings.load_spec(config, policy)),
            ),
            "teacher": (
                ReferenceWorker,
                RoleSettings(config=config, load=settings.load_spec(config, teacher)),
            ),
            "critic": (CriticWorker, settings.trained_settings(config, critic, critic_steps)),
            "reward": (RewardWorker, settings.reward_settings(config)),
        }
        groups, created = {}, []
        for hosts in self.processes.hosts:
            for role in hosts.group.roles:
                groups[role] = WorkerGroup(hosts, role)
                created += groups[role].create(*workers[role])
        gather(created, timeout_s=self.config.train.setup_timeout, doing="load the models")
        return groups

    def _check_room(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Print a notice if the disk is too small for the checkpoints. Raises CheckpointError if
        one alone does not fit.
        """
        trained = [groups[role] for role in ("actor", "critic") if role in groups]
        if not self.config.ckpt.resumable or not trained:
            return
        asked = [group.broadcast(TrainedWorker.checkpoint_bytes)[0] for group in trained]
        sizes = gather(
            asked, timeout_s=self.config.train.setup_timeout, doing="tell the size of a checkpoint"
        )
        for sentence in self.checkpoints.check_room(sum(sizes)):
            self.recorder.display.note(f"Notice: {sentence}")

    def _make_trainer(self, groups: dict[str, WorkerGroup]) -> PPOTrainer | RolloutOnly:
        config = self.config
        models = RewardModels(groups.get("reward"), config.reward)
        generator = self._make_generator()
        stages = make_stages(config, groups)
        scored = EarlyStages(models=models, timeout_s=config.train.step_timeout)
        source = self._make_source(generator, scored, stages)
        self.ends.callback(source.close)
        scored_early = source.keep or config.train.async_enable
        maker = ExperienceMaker(config, stages, None if scored_early else models)
        if config.rollout.only:
            return RolloutOnly(source, maker, self.recorder)
        weights = self._make_publisher(groups["actor"])
        clock = Clock(self.recorder.display.status)
        best = BestMetric(
            config.ckpt.best_metric_key, ending="_pass1", patience=config.eval.patience
        )
        policy = groups["actor"]
        critic = groups.get("critic")
        exporting = Exporting(
            policy=policy,
            critic=critic,
            tokenizer=self.data.tokenizer,
            recorder=self.recorder,
            config=config,
        )
        return PPOTrainer(
            source,
            maker,
            ModelUpdate(
                policy=policy,
                critic=critic,
                weights=weights,
                pretraining=self.data.pretraining,
                config=config,
            ),
            weights,
            evaluation=Evaluation(
                play=self._make_evaluation(generator, scored),
                best=best,
                errors=source.errors,
                recorder=self.recorder,
                clock=clock,
                config=config.eval,
            ),
            checkpointing=Checkpointing(
                manager=self.checkpoints,
                models={"_actor": policy} | ({"_critic": critic} if critic else {}),
                source=source,
                kl=maker.kl,
                best=best,
                exporting=exporting,
                recorder=self.recorder,
                clock=clock,
                config=config,
                start=self.start,
            ),
            exporting=exporting,
            recorder=self.recorder,
            clock=clock,
            hosts=self.processes.hosts,
            config=config,
        )

    def _make_publisher(self, policy: WorkerGroup) -> WeightPublisher:
        config = self.config
        prompts = [self.data.train[0].tokens, self.data.train[-1].tokens]
        publisher = WeightPublisher(
            policy,
            self.fleet,
            transport=settings.transport(config, self.kind),
            timeout_s=config.train.publish_timeout,
            probe=settings.engine_probe(config, prompts),
        )
        if self.fleet:
            self.fleet.refit = publisher.refit
            self.fleet.say = self.recorder.display.note
        return publisher

    def _make_generator(self) -> Generator:
        """Engines and reward; with --rollout.dump_dir also written to disk, with
        --rollout.replay_dir read instead.
        """
        config = self.config
        if self.replay:
            return ReplayGenerator(self.replay)
        assert self.fleet
        rewarded = bool(config.reward.models or config.algo.distill.teacher)
        agents = make_agents(
            config, self.data.tokenizer, needs_reward=not rewarded, log_dir=Path(self.log_dir)
        )
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
        return DumpingGenerator(generator, folder, run=identity)

    def _make_source(
        self, generator: Generator, scored: EarlyStages, stages: Sequence[Stage]
    ) -> SyncSource | AsyncSource:
        config = self.config
        common = self.data.train, generator, self.loop, settings.train_sampling(config), config
        if config.train.async_enable:
            # π_old is the policy of the update; and the policy scores no rows while it is updated.
            early = [stage for stage in stages if stage.by.role != "actor"]
            scored = replace(scored, stages=early)
            return AsyncSource(*common, annotated=scored.of_group)
        source = SyncSource(
            *common,
            annotated=scored.of_group if config.algo.dynamic_filtering_enable else as_sampled,
            last_step=self.replay.last_step if self.replay else None,
        )
        if self.replay and self.replay.last_step < source.total_steps:
            self.recorder.display.note(
                f"--rollout.replay_dir ends with step {self.replay.last_step} of the {source.total_steps} steps that the "
                "prompts allow."
            )
        return source

    def _make_evaluation(self, generator: Generator, scored: EarlyStages) -> Evaluate | None:
        prompts, spec = self.data.eval, settings.eval_sampling(self.config)
        if prompts is None or self.replay:
            return None

        def evaluation(step: int) -> list[Trajectory]:
            timeout_s = self.config.train.step_timeout
            return scored.annotated(
                evaluate(prompts, generator, self.loop, spec, step=step, timeout_s=timeout_s)
            )

        return evaluation


def make_stages(config: PPOConfig, groups: Mapping[str, WorkerGroup]) -> list[Stage]:
    """The columns that the update needs, and the workers that compute them."""
    stages: list[Stage] = []
    if "actor" in groups and settings.needs_old_logprobs(config):
        stages.append(
            Stage(writes="old_logprobs", by=groups["actor"], method=PolicyWorker.logprobs)
        )
    if "actor" in groups and config.algo.kl.init_coef and not config.has_reference:
        stages.append(
            Stage(writes="ref_logprobs", by=groups["actor"], method=PolicyWorker.reference_logprobs)
        )
    for role, column in (("ref", "ref_logprobs"), ("teacher", "teacher_logprobs")):
        if role in groups:
            stages.append(Stage(writes=column, by=groups[role], method=ReferenceWorker.logprobs))
    if "critic" in groups:
        stages.append(
            Stage(
                writes="values",
                by=groups["critic"],
                method=CriticWorker.values,
                reads=Experience.texts,
            )
        )
    return stages
