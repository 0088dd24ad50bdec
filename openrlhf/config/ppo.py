"""Root of RL: what follows from its flags, what the user may have to know, and what may be wrong."""

from __future__ import annotations

from typing import Any, Self

from openrlhf.config import choices, machine, ppo_rules, rules
from openrlhf.config.effects import Sentences, combined
from openrlhf.config.flags import value_at
from openrlhf.config.learning import RLFlags
from openrlhf.config.rollout import RolloutConfig, VLLMConfig


def group_sizes(config: RLFlags) -> dict[str, Any]:
    """What follows from this machine; and a role that shares another's devices has the same size."""
    sizes = rules.machine_values(config)
    owners = {
        role: roles[0]
        for roles in config.train.colocated
        for role in roles[1:]
        if role != "teacher"
    }
    for role, owner in owners.items():
        for leaf in ("num_nodes", "num_gpus_per_node"):
            if f"{role}.{leaf}" not in config.given:
                path = f"{owner}.{leaf}"
                sizes[f"{role}.{leaf}"] = sizes.get(path, value_at(config, path))
    return sizes


def learning_values(config: RLFlags) -> dict[str, Any]:
    """What follows for rewards, critic and losses, by path."""
    actor, train, reward = config.actor, config.train, config.reward
    gamma, loss = config.algo.advantage.gamma, choices.POLICY_LOSSES[actor.policy_loss_type]
    clip = None if "actor.eps_clip" in config.given else loss.clip
    critic = config.critic.model_name_or_path or next(
        iter(reward.scalars), actor.model_name_or_path
    )
    advantage, preset = config.algo.advantage, ppo_rules.correction_preset(config)
    own = {
        "actor.eps_clip_low_high": clip or (actor.eps_clip, actor.eps_clip),
        "algo.loss.aggregation": loss.aggregation,
    } | (preset if advantage.is_correction_enable else {})
    return config.unless_given(own) | {
        "critic.model_name_or_path": critic if config.estimator.needs_critic else None,
        "reward.remote_url": None if train.agent_func_path else reward.remote_url,
        "algo.advantage.gamma": 1.0 if config.estimator.needs_groups else gamma,
        "train.max_staleness": train.max_staleness or train.async_queue_size,
        "ckpt.load_enable": config.ckpt.load_enable and not config.rollout.only,
    }


def rollout_values(config: RLFlags) -> dict[str, Any]:
    """What follows for engines, sampling and micro-batches, by path."""
    train, rollout, vllm, ds = config.train, config.rollout, config.vllm, config.ds
    tokens = rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
    shared = rollout.n_samples_per_prompt > 1 or train.agent_func_path is not None
    return engine_values(vllm, rollout, ds.param_dtype, shared=shared) | {
        "rollout.max_tokens_per_gpu": tokens if train.dynamic_batch_enable else None,
        "vllm.enable_sleep": vllm.enable_sleep and config.hybrid,
        "ds.packing_samples": ds.packing_samples or train.dynamic_batch_enable,
    }


def engine_values(
    vllm: VLLMConfig, rollout: RolloutConfig, param_dtype: str, *, shared: bool
) -> dict[str, Any]:
    """What follows for engines in RL and evaluation; `shared`: samples share prefixes."""
    seeded = "off" if machine.count_gpus() else "on"  # on GPUs it costs time and is not exact
    return {
        "rollout.vllm_generate_batch_size": rollout.vllm_generate_batch_size or rollout.batch_size,
        "rollout.seeded": seeded if rollout.seeded == "auto" else rollout.seeded,
        "vllm.max_engines": vllm.max_engines or vllm.num_engines,
        "vllm.dtype": param_dtype if vllm.dtype == "auto" else vllm.dtype,
        "vllm.sync_backend": "gloo"
        if vllm.sync_backend == "nccl" and not machine.count_gpus()
        else vllm.sync_backend,
        "vllm.enable_prefix_caching": (vllm.enable_prefix_caching or shared)
        and not vllm.disable_prefix_caching,
    }


# fmt: off
class PPOConfig(RLFlags):
    def resolve(self, *, command: str) -> tuple[Self, list[str]]:
        """As for every command. The GPUs are those of --placement.cluster, if it is given."""
        if gpus := sum(machine.declared_machines(self.placement.cluster or "")):
            machine.cluster_gpus = gpus
        return super().resolve(command=command)

    def derived_values(self) -> dict[str, Any]:
        """What follows from the flags of RL, by path."""
        return group_sizes(self) | learning_values(self) | rollout_values(self)

    def notices(self) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        combinations = combined(self, "noticed", "reinforcement")
        held_out = rules.held_out_notices(self, "data.prompt_dataset", "data.prompt_split")
        return [*self._device_notices(), *self._algorithm_notices(), *combinations, *held_out, *super().notices()]

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        own = (row for rule in ppo_rules.RULES for row in rule(self))
        return [*super().mistakes(), *rules.reward_mistakes(self), *own]

    def _device_notices(self) -> Sentences:
        """Where processes run, what they share, and how samples become optimizer steps."""
        train, rollout, trains = self.train, self.rollout, not self.rollout.only
        micro = f"{train.max_tokens_per_gpu} tokens" if train.dynamic_batch_enable else train.micro_batch_size
        steps = self.samples // max(1, train.batch_size) * train.max_epochs
        ahead = rollout.vllm_generate_batch_size > rollout.batch_size and not train.async_enable
        corrected = self.algo.advantage.is_correction_enable or self.algo.correction.level
        return [
            *rules.single_process_notices(self),
            (trains and ahead, f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size} generates for more "
             "than one step: the later steps train on samples of older weights"
             + ("." if corrected else ". Without --algo.advantage.is_correction_enable the loss is not corrected for that.")),
            (trains, f"Each iteration: {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} = "
             f"{self.samples} samples, {steps} optimizer step(s) of {train.batch_size} on "
             f"{self.data_slices} rank(s), micro-batches of {micro}."),
        ]

    def _algorithm_notices(self) -> Sentences:
        """What is used in an unusual way."""
        actor, kl, kinds = self.actor, self.algo.kl, choices.KL_ESTIMATORS
        clip, both = actor.eps_clip_low_high, {"actor.eps_clip", "actor.eps_clip_low_high"} <= self.given.keys()
        fitting = [name for name in kinds if ("loss" if kl.use_loss else "reward") in kinds[name]]
        return [
            (both and clip != (actor.eps_clip, actor.eps_clip),
             "--actor.eps_clip has no effect beside --actor.eps_clip_low_high."),
            (actor.policy_loss_type == "gspo" and max(clip) > 0.01,  # ratios of sequences move little
             "With gspo <actor.eps_clip_low_high> hardly ever binds: its paper uses 3e-4 4e-4."),
            (kl.init_coef and kl.use_loss and kl.estimator not in fitting,
             "<algo.kl.estimator> as a loss has an expected gradient of zero: with --algo.kl.use_loss "
             f"use {' or '.join(fitting)}."),
            (kl.in_reward and kl.estimator not in fitting,
             f"<algo.kl.estimator> is meant for --algo.kl.use_loss: in the rewards use {' or '.join(fitting)}."),
            (kl.stop_update and self.samples * self.train.max_epochs <= self.train.batch_size,
             "--algo.kl.stop_update has no effect: each batch makes one optimizer step."),
        ]
