"""From the flags to a running PPO trainer: Ray, engines, workers, data, and who gets which piece of the configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from transformers import AutoConfig, PreTrainedTokenizerBase

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.kl import FixedKL
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, EngineLayout
from openrlhf.config.machine import count_gpus
from openrlhf.config.options import ConfigError
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.loading import DataError, load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.distributed import placement
from openrlhf.distributed.buckets import PublicationError
from openrlhf.distributed.strategy import NonFiniteError
from openrlhf.distributed.worker_group import HostHandles, WorkerError, WorkerGroup, gather
from openrlhf.models.loading import LoadSpec
from openrlhf.rollout.engine import RolloutEngine
from openrlhf.rollout.engine_settings import EngineSettings, engine_environment
from openrlhf.rollout.generator import RolloutError, RolloutGenerator, SamplingSpec
from openrlhf.rollout.hosts import HostPool
from openrlhf.rollout.rewards import (
    ErrorBudget,
    ErrorPolicy,
    FunctionReward,
    RewardErrors,
    VerifierReward,
)
from openrlhf.trainers.experience_maker import CreditSettings, ExperienceMaker
from openrlhf.trainers.ppo import LoopSettings, PPOTrainer
from openrlhf.trainers.publisher import WeightPublisher
from openrlhf.trainers.recorder import Recorder
from openrlhf.trainers.sources import SyncSource, evaluate
from openrlhf.workers.base import MicroBatchLimits
from openrlhf.workers.frozen import ReferenceSettings, ReferenceWorker
from openrlhf.workers.policy import Objective, PolicySettings, PolicyWorker

logger = logging.getLogger(__name__)

BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
OBJECT_STORE_BYTES = (
    512 << 20
)  # of a Ray that we start on a machine without GPUs: batches are flat and small
# What a user can mend: printed without a traceback.
USER_ERRORS = (
    ConfigError,
    DataError,
    CheckpointError,
    placement.PlacementError,
    RewardErrors,
    RolloutError,
    WorkerError,
    NonFiniteError,
    PublicationError,
)
TORCH_NAMES = {"bf16": "bfloat16", "fp32": "float32"}


def run_ppo(config: PPOConfig) -> None:
    """Train as the flags say, from a Ray that is there or one of our own."""
    checkpoints = CheckpointManager(
        config.ckpt.path,
        parts=[] if config.ckpt.disable_ds else ["_actor"],
        max_num=config.ckpt.max_num,
        max_mem_gib=config.ckpt.max_mem,
    )
    checkpoint = checkpoints.latest() if config.ckpt.load_enable else None
    if checkpoint:
        check_resumable(checkpoint, config)
    data = load_prompts(config)
    kind = "cuda" if count_gpus() else "cpu"
    plan = plan_placement(config, kind)
    if config.dry_run:
        show_plan(config, data, plan)
        return
    with ray_cluster(plan), Run(config, data, plan, kind, checkpoints, checkpoint) as run:
        run.trainer.fit()


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """What is read from disk before any process starts."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    eval: PromptDataset | None


def load_prompts(config: PPOConfig) -> PromptData:
    """Tokenizer, training prompts and evaluation prompts. Raises DataError."""
    data = config.data
    tokenizer = get_tokenizer(
        config.actor.model_name_or_path,
        padding_side="left",
        use_fast=not data.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
    )

    def prompts(spec: str, *, split: str, probs: str | None) -> PromptDataset:
        rows = load_datasets(
            spec, split=split, probs=probs, max_samples=data.max_samples, seed=config.train.seed
        )
        return PromptDataset(
            rows,
            tokenizer,
            input_key=data.input_key,
            label_key=data.label_key,
            input_template=data.input_template,
            apply_chat_template=data.apply_chat_template,
            image_key=data.image_key,
        )

    return PromptData(
        tokenizer=tokenizer,
        train=prompts(data.prompt_dataset, split=data.prompt_split, probs=data.prompt_probs),
        eval=prompts(config.eval.dataset, split=config.eval.split, probs=None)
        if config.eval.dataset
        else None,
    )


def plan_placement(config: PPOConfig, kind: str) -> placement.Placement:
    """Which roles there are, and which of them share devices."""
    roles = {"actor": (config.actor.num_nodes, config.actor.num_gpus_per_node)}
    if config.algo.kl.init_coef > 0:
        roles["ref"] = (config.ref.num_nodes, config.ref.num_gpus_per_node)
    together = [("actor", "ref")] if config.train.colocate_actor_ref else []
    return placement.plan(
        roles, engines=config.vllm.num_engines, on_gpus=kind == "cuda", colocated=together
    )


def show_plan(config: PPOConfig, data: PromptData, plan: placement.Placement) -> None:
    """What --dry_run prints: who goes where, and the first prompts."""
    print(plan.describe())
    steps = -(-len(data.train) // config.rollout.batch_size) * config.train.num_episodes
    print(f"{len(data.train)} prompts, {steps} steps of {config.rollout.batch_size} prompts")
    for row in (data.train[i] for i in range(min(3, len(data.train)))):
        print(f"prompt {row.text!r} ({len(row.tokens)} tokens), label {row.label!r}")


@contextmanager
def ray_cluster(plan: placement.Placement) -> Iterator[None]:
    """Join the Ray that is running (RAY_ADDRESS, a job, or one on this machine), else start one for the run."""
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            _start_ray(plan)
    try:
        placement.check_capacity(plan, ray.cluster_resources())
        yield
    finally:
        if started:
            ray.shutdown()


def _start_ray(plan: placement.Placement) -> None:
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # leave CUDA_VISIBLE_DEVICES of GPU-less actors alone
    small = {} if plan.on_gpus else {"object_store_memory": OBJECT_STORE_BYTES}
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, 4),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        **small,
    )


class Run:
    """Everything that lives as long as a run: engines, workers, reward hosts, trainer. Leaving it ends them all."""

    def __init__(
        self,
        config: PPOConfig,
        data: PromptData,
        plan: placement.Placement,
        kind: str,
        checkpoints: CheckpointManager,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config, self.data, self.plan, self.kind = config, data, plan, kind
        self.run_dir = checkpoint.state.run_dir if checkpoint else config.run.dir
        self.recorder = Recorder(
            config,
            logger=config.logger,
            run=config.run,
            run_dir=self.run_dir,
            resume_step=checkpoint.state.step if checkpoint else None,
        )
        self.log_dir = str(self.recorder.folder.logs.absolute())
        self.engines: list[Any] = []
        self.hosts: list[HostHandles] = []
        self.pool = HostPool(
            config.reward.workers or os.cpu_count() or 1,
            memory_gib=config.reward.memory_gib,
            log_dir=Path(self.log_dir),
        )
        self.checkpoints, self.checkpoint = checkpoints, checkpoint

    def __enter__(self) -> Run:
        try:
            starting = self._start_engines()
            policy, reference = self._start_workers()
            gather(starting, timeout_s=self.config.train.setup_timeout, doing="start the engines")
            self.trainer = self._make_trainer(policy, reference)
            if self.checkpoint:
                self.trainer.resume(self.checkpoint)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        for engine in self.engines:
            ray.kill(engine)
        for group in self.hosts:
            group.close()
        self.recorder.display.close()

    def _start_engines(self) -> list[Any]:
        """Engine actors on their slots; references of their starts, which take a while."""
        config, group = self.config, self.plan.group_of("vllm")
        reserved = placement.reserve(
            group, on_gpus=self.plan.on_gpus, timeout_s=config.train.setup_timeout
        )
        settings = engine_settings(config, self.kind, self.data.tokenizer)
        engine = ray.remote(RolloutEngine)
        self.engines = [
            engine.options(
                **placement.actor_options(reserved, index, on_gpus=self.plan.on_gpus),
                max_concurrency=4096,
                runtime_env={"env_vars": engine_environment(settings.device)},
            ).remote(settings, index)
            for index in range(group.slots)
        ]
        return [engine.start.remote() for engine in self.engines]

    def _start_workers(self) -> tuple[WorkerGroup, WorkerGroup | None]:
        config = self.config
        for group in self.plan.groups:
            if group.name != "vllm":
                self.hosts.append(self._start_hosts(group))
        by_role = {role: hosts for hosts in self.hosts for role in hosts.group.roles}
        policy = WorkerGroup(by_role["actor"], "actor")
        total_steps = optimizer_steps(config, len(self.data.train))
        created = policy.create(PolicyWorker, policy_settings(config, self.kind, total_steps))
        reference = None
        if "ref" in by_role:
            reference = WorkerGroup(by_role["ref"], "ref")
            created += reference.create(ReferenceWorker, reference_settings(config))
        gather(
            created, timeout_s=config.train.setup_timeout, doing="load the models", logs=policy.logs
        )
        return policy, reference

    def _start_hosts(self, group: placement.HostGroup) -> HostHandles:
        config = self.config
        return HostHandles(
            group,
            on_gpus=self.plan.on_gpus,
            threads=max(1, (os.cpu_count() or 1) // group.slots_per_node),
            log_dir=self.log_dir,
            timeout_s=config.train.setup_timeout,
            settings={
                "engine": config.ds,
                "seed": config.train.seed,
                "full_determinism": config.train.full_determinism_enable,
            },
        )

    def _make_trainer(self, policy: WorkerGroup, reference: WorkerGroup | None) -> PPOTrainer:
        config, kl = self.config, FixedKL(self.config.algo.kl.init_coef)
        on_error = ErrorPolicy.parse(config.reward.on_error)
        generator = RolloutGenerator(
            self.engines,
            self.data.tokenizer,
            make_reward(config, self.pool),
            on_error=on_error,
            timeout_s=config.train.step_timeout,
        )
        source = SyncSource(
            self.data.train,
            generator,
            train_sampling(config),
            batch_size=config.rollout.batch_size,
            episodes=config.train.num_episodes,
            seed=config.train.seed,
            num_workers=config.data.dataloader_num_workers,
        )
        maker = ExperienceMaker(
            policy,
            reference,
            credit_settings(config),
            kl,
            recompute_old=needs_old_logprobs(config),
            timeout_s=config.train.step_timeout,
        )
        weights = WeightPublisher(
            policy,
            self.engines,
            transport="nccl" if self.kind == "cuda" else "gloo",
            timeout_s=config.train.publish_timeout,
        )
        return PPOTrainer(
            source,
            maker,
            policy,
            weights,
            kl=kl,
            errors=ErrorBudget(max_error_rate=config.reward.max_error_rate, policy=on_error),
            evaluate=partial(
                evaluate,
                self.data.eval,
                generator,
                eval_sampling(config),
                wave=config.rollout.batch_size,
            )
            if self.data.eval is not None
            else None,
            checkpoints=self.checkpoints,
            ckpt=config.ckpt,
            tokenizer=self.data.tokenizer,
            recorder=self.recorder,
            settings=loop_settings(config, self.run_dir),
        )


# Who gets which piece of the configuration.


def make_reward(config: PPOConfig, pool: HostPool) -> FunctionReward | VerifierReward:
    """The reward that the flags name."""
    timeout = config.reward.timeout
    if config.reward.verifier:
        return VerifierReward(config.reward.verifier, pool=pool, timeout=timeout)
    return FunctionReward(
        config.reward.remote_url, pool=pool, timeout=timeout, batch=config.reward.batch
    )


def needs_old_logprobs(config: PPOConfig) -> bool:
    """Whether π_old is recomputed: not if the update is strictly on-policy and nothing else looks at it.

    With one optimizer step per batch, one pass, no KL in the reward and no dropout, the ratio is 1 by construction.
    """
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    one_step = config.train.max_epochs == 1 and config.train.batch_size >= samples
    kl_in_reward = config.algo.kl.init_coef > 0 and not config.algo.kl.use_loss
    return not one_step or kl_in_reward or has_dropout(config)


def has_dropout(config: PPOConfig) -> bool:
    """Whether the model's forward draws random numbers while it trains."""
    architecture = AutoConfig.from_pretrained(
        config.actor.model_name_or_path, trust_remote_code=config.model.trust_remote_code
    ).to_dict()
    return any(
        isinstance(value, float) and value > 0
        for name, value in architecture.items()
        if "dropout" in name or "pdrop" in name
    )


def optimizer_steps(config: PPOConfig, prompts: int) -> int:
    """Length of the learning-rate schedule."""
    samples = prompts * config.rollout.n_samples_per_prompt * config.train.num_episodes
    return max(1, samples * config.train.max_epochs // config.train.batch_size)


def load_spec(config: PPOConfig) -> LoadSpec:
    """How the policy's weights are loaded."""
    return LoadSpec(
        path=config.actor.model_name_or_path,
        param_dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        packing=config.ds.packing_samples,
        gradient_checkpointing=config.actor.gradient_checkpointing_enable,
        reentrant=config.actor.gradient_checkpointing_reentrant,
        trust_remote_code=config.model.trust_remote_code,
    )


def forward_limits(config: PPOConfig) -> MicroBatchLimits:
    """Micro-batches of forwards without gradient."""
    tokens = config.rollout.max_tokens_per_gpu if config.train.dynamic_batch_enable else None
    return MicroBatchLimits(size=config.rollout.micro_batch_size, max_tokens=tokens)


def policy_settings(config: PPOConfig, kind: str, total_steps: int) -> PolicySettings:
    """What the policy workers need to know."""
    actor, algo = config.actor, config.algo
    clip_low, clip_high = actor.eps_clip_low_high
    tokens = config.train.max_tokens_per_gpu if config.train.dynamic_batch_enable else None
    return PolicySettings(
        load=load_spec(config),
        optimizer=actor,
        objective=Objective(
            policy_loss=actor.policy_loss_type,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=actor.dual_clip,
            aggregation=algo.loss.aggregation,
            max_response_tokens=config.rollout.max_new_tokens or config.data.max_len,
            kl_estimator=algo.kl.estimator,
            kl_in_loss=algo.kl.use_loss,
            entropy_coef=actor.entropy_coef,
        ),
        forward=forward_limits(config),
        train=MicroBatchLimits(size=config.train.micro_batch_size, max_tokens=tokens),
        temperature=config.rollout.temperature,
        total_steps=total_steps,
        max_nonfinite=config.train.max_nonfinite,
        bucket_bytes=BUCKET_BYTES[kind],
        wire_dtype=TORCH_NAMES[config.vllm.dtype],
    )


def reference_settings(config: PPOConfig) -> ReferenceSettings:
    """What the reference workers need to know."""
    return ReferenceSettings(
        load=load_spec(config),
        forward=forward_limits(config),
        temperature=config.rollout.temperature,
    )


def credit_settings(config: PPOConfig) -> CreditSettings:
    """How rewards become advantages."""
    reward, advantage, kl = config.reward, config.algo.advantage, config.algo.kl
    return CreditSettings(
        estimator=advantage.estimator,
        gamma=advantage.gamma,
        lam=advantage.lambd,
        scale_advantages=not advantage.no_std_norm,
        kl_estimator=kl.estimator,
        kl_in_reward=kl.init_coef > 0 and not kl.use_loss,
        reward_clip=reward.clip_range,
        overlong_buffer=reward.overlong_buffer_len,
        overlong_factor=reward.overlong_penalty_factor,
        stop_properly=reward.stop_properly_penalty_coef,
        max_new_tokens=config.rollout.max_new_tokens,
        max_len=config.data.max_len,
    )


def engine_settings(
    config: PPOConfig, kind: str, tokenizer: PreTrainedTokenizerBase
) -> EngineSettings:
    """What the engines are made of."""
    return EngineSettings(
        model=config.actor.model_name_or_path,
        dtype=TORCH_NAMES[config.vllm.dtype],
        max_model_len=config.data.max_len,
        seed=config.train.seed,
        device=kind,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enforce_eager=config.vllm.enforce_eager or kind == "cpu",
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        seeded=config.rollout.seeded == "on",
        end_token_ids=(tokenizer.eos_token_id,),
        trust_remote_code=config.model.trust_remote_code,
    )


def train_sampling(config: PPOConfig) -> SamplingSpec:
    """How training samples are drawn."""
    return SamplingSpec(
        purpose="train",
        n_samples=config.rollout.n_samples_per_prompt,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_new_tokens=config.rollout.max_new_tokens,
        max_len=config.data.max_len,
        seed=config.train.seed if config.rollout.seeded == "on" else None,
    )


def eval_sampling(config: PPOConfig) -> SamplingSpec:
    """How evaluation samples are drawn: as in training but for temperature and number."""
    return SamplingSpec(
        purpose="eval",
        n_samples=config.eval.n_samples_per_prompt,
        temperature=config.eval.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_new_tokens=config.rollout.max_new_tokens,
        max_len=config.data.max_len,
        seed=config.train.seed if config.rollout.seeded == "on" else None,
    )


def loop_settings(config: PPOConfig, run_dir: str) -> LoopSettings:
    """What the loop itself needs to know."""
    return LoopSettings(
        batch_size=config.train.batch_size,
        epochs=config.train.max_epochs,
        seed=config.train.seed,
        needs_groups=ADVANTAGE_ESTIMATORS[config.algo.advantage.estimator].per_group,
        eval_steps=config.eval.steps,
        eval_at_start=config.eval.at_start,
        eval_samples=config.eval.n_samples_per_prompt,
        best_metric_key=config.ckpt.best_metric_key,
        step_timeout=config.train.step_timeout,
        run_dir=run_dir,
        layout=engine_layout(config),
    )


def engine_layout(config: PPOConfig) -> EngineLayout:
    """How the policy's state is cut into files."""
    world = config.actor.num_nodes * config.actor.num_gpus_per_node
    return EngineLayout(world_size=world, zero_stage=config.ds.zero_stage)


def check_resumable(checkpoint: Checkpoint, config: PPOConfig) -> None:
    """Raise CheckpointError where the run's layout is not the checkpoint's."""
    there, here = checkpoint.state.engines.get("_actor"), engine_layout(config)
    if there != here:
        raise CheckpointError(
            f"{checkpoint.tag} in --ckpt.path {config.ckpt.path} was written by {there}, and this run is {here}: "
            "use the same --actor.num_nodes, --actor.num_gpus_per_node and --ds.zero_stage."
        )
