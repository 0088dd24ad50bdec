"""RL configuration and the values derived from its flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from openrlhf.config import machine, ppo_notices, ppo_rules, rules
from openrlhf.config.flags import amend, value_at
from openrlhf.config.groups import used_sections
from openrlhf.config.learning import RLFlags
from openrlhf.config.rollout import RolloutConfig, VLLMConfig
from openrlhf.config.training_rules import held_out_notices

SIZES = ("num_nodes", "num_gpus_per_node")


def group_sizes(config: RLFlags) -> dict[str, Any]:
    """Return the role sizes that depend on this machine, keyed by flag path.

    Roles that share devices have the same size. A role without a model may have the size 0.
    """
    sizes = rules.machine_values(config)
    used = used_sections(config).values()
    for path, value in config.given.items():
        role, _, leaf = path.partition(".")
        if leaf in SIZES and role not in used and value == 0:
            sizes[path] = 1
    for owner, *others in config.train.colocated:
        for leaf in SIZES:
            size = sizes.get(f"{owner}.{leaf}", value_at(config, f"{owner}.{leaf}"))
            shared = {f"{role}.{leaf}": size for role in others if role != "teacher"}
            sizes |= config.unless_given(shared)
    return sizes


def learning_values(config: RLFlags) -> dict[str, Any]:
    """Return derived settings of rewards, critic and losses, keyed by flag path."""
    loss = config.policy_loss_traits
    eps_clip = config.actor.eps_clip
    clip = (eps_clip, eps_clip)
    if loss.clip and "actor.eps_clip" not in config.given:
        clip = loss.clip
    values = config.unless_given(
        {"actor.eps_clip_low_high": clip, "algo.loss.aggregation": loss.aggregation}
    )
    values["critic.model_name_or_path"] = None
    if config.estimator_traits.needs_critic:
        sources = [config.critic.model_name_or_path, *config.reward.scalars]
        source = next(filter(None, sources), config.actor.model_name_or_path)
        values["critic.model_name_or_path"] = source
    if config.estimator_traits.per_episode:
        values["algo.advantage.gamma"] = 1.0
    if config.train.agent_func_path:
        values["reward.remote_url"] = None
    if config.rollout.only:
        values["ckpt.load_enable"] = False
    values["train.max_staleness"] = config.train.max_staleness or config.train.async_queue_size
    return values


def full_step_values(config: RLFlags) -> dict[str, Any]:
    """Return the sizes of a rollout that fills an optimizer step, keyed by flag path.

    Several small rollouts that fill one step come from the same policy, as does one rollout with
    all their prompts. Empty if the sizes need no change or if no number of rollouts fills a step.
    """
    train, rollout = config.train, config.rollout
    if rollout.only or rollout.replay_dir or not 0 < config.samples < train.batch_size:
        return {}
    if train.batch_size % config.samples:
        return {}
    prompts = train.batch_size // rollout.n_samples_per_prompt
    values: dict[str, Any] = {"rollout.batch_size": prompts}
    if at_once := rollout.vllm_generate_batch_size:
        values["rollout.vllm_generate_batch_size"] = max(at_once, prompts)
    return values


def rollout_values(config: RLFlags) -> dict[str, Any]:
    """Return derived settings of engines, sampling and micro-batches, keyed by flag path."""
    train, rollout, vllm = config.train, config.rollout, config.vllm
    shared = rollout.n_samples_per_prompt > 1 or train.agent_func_path is not None
    values = engine_values(vllm, rollout, config.ds.param_dtype, shared=shared)
    values["vllm.enable_sleep"] = vllm.enable_sleep and config.hybrid
    values["rollout.max_tokens_per_gpu"] = None
    if train.dynamic_batch_enable:
        tokens = rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
        values["rollout.max_tokens_per_gpu"] = tokens
        values["ds.packing_samples"] = True
    return values


def engine_values(
    vllm: VLLMConfig, rollout: RolloutConfig, param_dtype: str, *, shared: bool
) -> dict[str, Any]:
    """Return derived engine settings for RL and evaluation, keyed by flag path.

    `shared` is true if samples share prefixes.
    """
    caches = vllm.enable_prefix_caching or shared
    values: dict[str, Any] = {
        "rollout.vllm_generate_batch_size": rollout.vllm_generate_batch_size or rollout.batch_size,
        "vllm.max_engines": vllm.max_engines or vllm.num_engines,
        "vllm.enable_prefix_caching": caches and not vllm.disable_prefix_caching,
    }
    if vllm.dtype == "auto":
        values["vllm.dtype"] = param_dtype
    if rollout.seeded == "auto":
        values["rollout.seeded"] = "on"
        if machine.count_gpus():
            # on GPUs, seeded sampling is slower and not exactly reproducible
            values["rollout.seeded"] = "off"
    if vllm.sync_backend == "nccl" and not machine.count_gpus():
        values["vllm.sync_backend"] = "gloo"
    return values


class PPOConfig(RLFlags):
    """Reinforcement learning."""

    def resolve(self, *, command: str) -> tuple[Self, list[str]]:
        """Resolve like any command, but use the GPUs of --placement.cluster if the flag is set."""
        if gpus := sum(machine.declared_machines(self.placement.cluster or "")):
            machine.cluster_gpus = gpus
        return super().resolve(command=command)

    def derived_values(self) -> dict[str, Any]:
        """Return the values derived from the RL flags, keyed by flag path."""
        sizes = full_step_values(self)
        config = amend(self, sizes)
        return sizes | group_sizes(config) | learning_values(config) | rollout_values(config)

    def notices(self) -> Iterator[str]:
        """Yield notices about this resolved configuration."""
        yield from ppo_notices.notices(self)
        yield from held_out_notices(self, "data.prompt_dataset", "data.prompt_split")
        yield from super().notices()

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        yield from ppo_rules.violations(self)
