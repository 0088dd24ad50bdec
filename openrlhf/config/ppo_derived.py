"""What follows from the flags of RL: derived values and notices, one function each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from openrlhf.config import choices, machine
from openrlhf.config.flags import value_at
from openrlhf.config.rules import Derivation, Derived, Request, items, muon_notice

if TYPE_CHECKING:
    from openrlhf.config.ppo import PPOConfig


def one_process_without_gpus(config: PPOConfig, request: Request) -> Derived | None:
    """The default of eight GPUs per node means one CPU process where there is none."""
    present = {
        "actor": True,
        "ref": config.algo.kl.init_coef > 0,
        "critic": config.estimator.needs_critic,
        "reward": config.reward.model_name_or_path is not None,
    }
    unset = [r for r in present if f"{r}.num_gpus_per_node" not in request.explicit]
    if machine.count_gpus() > 0 or not unset:
        return None
    named = ", ".join(f"--{role}.num_gpus_per_node" for role in unset if present[role])
    return Derived(
        values={f"{role}.num_gpus_per_node": 1 for role in unset},
        notice=f"No GPU on this machine: {named} is 1." if named else "",
    )


def sharers_have_one_size(config: PPOConfig, request: Request) -> Derived | None:
    """A role that shares another's devices has its size, unless the user said otherwise."""
    train = config.train
    shared = {"ref": "actor"} if train.colocate_actor_ref or train.colocate_all else {}
    if train.colocate_all:
        shared |= {"critic": "actor", "reward": "actor"}
    elif train.colocate_critic_reward:
        shared |= {"reward": "critic"}
    sizes = {
        f"{role}.{leaf}": value_at(config, f"{owner}.{leaf}")
        for role, owner in shared.items()
        for leaf in ("num_nodes", "num_gpus_per_node")
    }
    return Derived(values={k: v for k, v in sizes.items() if k not in request.explicit})


def clip_range(config: PPOConfig, request: Request) -> Derived | None:
    """eps_clip on both sides, or what the policy loss brings where no clip flag is given."""
    actor, given = config.actor, request.explicit
    both = (actor.eps_clip, actor.eps_clip)
    brought = choices.POLICY_LOSSES[actor.policy_loss_type].clip
    if "actor.eps_clip_low_high" in given:
        unused = "actor.eps_clip" in given and actor.eps_clip_low_high != both
        notice = "--actor.eps_clip has no effect beside --actor.eps_clip_low_high."
        return Derived(notice=notice if unused else "")
    if brought is not None and "actor.eps_clip" not in given:
        return Derived(values={"actor.eps_clip_low_high": brought})
    return Derived(values={"actor.eps_clip_low_high": both})


def muon_of_actor(config: PPOConfig, request: Request) -> Derived | None:
    """What Muon ignores, for the policy."""
    return muon_notice("actor.", config.actor)


def muon_of_critic(config: PPOConfig, request: Request) -> Derived | None:
    """What Muon ignores, for the critic."""
    return muon_notice("critic.", config.critic) if config.estimator.needs_critic else None


def agent_replaces_reward_function(config: PPOConfig, request: Request) -> Derived | None:
    """An agent scores its own episodes."""
    if config.train.agent_func_path is None or config.reward.remote_url is None:
        return None
    return Derived(
        values={"reward.remote_url": None},
        notice="--reward.remote_url is not used: the agent of --train.agent_func_path rewards.",
    )


def critic_source(config: PPOConfig, request: Request) -> Derived | None:
    """The critic starts from the first reward model, else the policy; others have none."""
    if config.estimator.needs_critic:
        first = next(iter(items(config.reward.model_name_or_path)), None)
        path = config.critic.model_name_or_path or first or config.actor.model_name_or_path
        return Derived(values={"critic.model_name_or_path": path})
    if config.critic.model_name_or_path is None:
        return None
    return Derived(
        values={"critic.model_name_or_path": None},
        notice="--critic.model_name_or_path is not used: --algo.advantage.estimator "
        f"{config.algo.advantage.estimator} has no critic.",
    )


def gamma_of_group_estimators(config: PPOConfig, request: Request) -> Derived | None:
    """Estimators with one number per episode do not discount."""
    gamma = config.algo.advantage.gamma
    if not config.estimator.forces_gamma_one or gamma == 1:
        return None
    return Derived(
        values={"algo.advantage.gamma": 1.0},
        notice=f"--algo.advantage.gamma {gamma:g} is not used: --algo.advantage.estimator "
        f"{config.algo.advantage.estimator} takes 1.",
    )


def loss_aggregation(config: PPOConfig, request: Request) -> Derived | None:
    """Each policy loss has an aggregation of its own where none is given."""
    if "algo.loss.aggregation" in request.explicit:
        return None
    kind = choices.POLICY_LOSSES[config.actor.policy_loss_type].aggregation
    return Derived(values={"algo.loss.aggregation": kind})


def sizes_that_follow_others(config: PPOConfig, request: Request) -> Derived | None:
    """Counts whose default is another flag's value."""
    rollout, train, vllm = config.rollout, config.train, config.vllm
    dynamic = train.max_tokens_per_gpu if train.dynamic_batch_enable else None
    return Derived(
        values={
            "rollout.vllm_generate_batch_size": rollout.vllm_generate_batch_size
            or rollout.batch_size,
            "rollout.max_tokens_per_gpu": rollout.max_tokens_per_gpu or dynamic,
            "train.max_staleness": train.max_staleness or train.async_queue_size,
            "vllm.max_engines": vllm.max_engines or vllm.num_engines,
            "reward.workers": config.reward.workers or os.cpu_count() or 1,
        }
    )


def packing_is_implied(config: PPOConfig, request: Request) -> Derived | None:
    """Dynamic batches and ring attention work on packed rows."""
    causes = {
        "--train.dynamic_batch_enable": config.train.dynamic_batch_enable,
        "--ds.ring_attn_size": config.ds.ring_attn_size > 1,
    }
    cause = next((name for name, holds in causes.items() if holds), None)
    if cause is None or config.ds.packing_samples:
        return None
    return Derived(
        values={"ds.packing_samples": True}, notice=f"{cause} turns --ds.packing_samples on."
    )


def engine_precision(config: PPOConfig, request: Request) -> Derived | None:
    """Engines compute in the data type of the trained weights."""
    if config.vllm.dtype != "auto" or config.ds.param_dtype == "fp16":
        return None
    return Derived(values={"vllm.dtype": config.ds.param_dtype})


def prefix_caching(config: PPOConfig, request: Request) -> Derived | None:
    """On where a prefix comes more than once."""
    wanted = config.vllm.enable_prefix_caching or config.prefix_is_shared
    off = config.vllm.disable_prefix_caching
    contradiction = off and "vllm.enable_prefix_caching" in request.explicit
    notice = "--vllm.disable_prefix_caching wins over --vllm.enable_prefix_caching."
    return Derived(
        values={"vllm.enable_prefix_caching": wanted and not off},
        notice=notice if contradiction and config.vllm.enable_prefix_caching else "",
    )


def seeded_sampling(config: PPOConfig, request: Request) -> Derived | None:
    """Seeds per sample make a run repeatable on CPUs; on GPUs they only cost time."""
    if config.rollout.seeded != "auto":
        return None
    return Derived(values={"rollout.seeded": "off" if machine.count_gpus() > 0 else "on"})


def engines_sleep_only_when_colocated(config: PPOConfig, request: Request) -> Derived | None:
    """Freeing devices that nobody else uses only costs time."""
    if not config.vllm.enable_sleep or config.train.colocate_all:
        return None
    return Derived(
        values={"vllm.enable_sleep": False},
        notice="--vllm.enable_sleep is off: it needs --train.colocate_all.",
    )


def engines_apart_when_async(config: PPOConfig, request: Request) -> Derived | None:
    """Generating while training needs devices of its own."""
    if not (config.train.colocate_all and config.train.async_enable):
        return None
    return Derived(
        notice="With --train.async_enable, --train.colocate_all joins the trained models only; "
        "engines have devices of their own."
    )


def kl_in_its_place(config: PPOConfig, request: Request) -> Derived | None:
    """Recommendations on where an estimator of the KL belongs."""
    kl, kinds = config.algo.kl, choices.KL_ESTIMATORS
    if kl.init_coef == 0:
        return None
    if kl.use_loss and not kinds[kl.estimator].in_loss:
        better = " or ".join(name for name, kind in kinds.items() if kind.in_loss)
        return Derived(
            notice=f"--algo.kl.estimator {kl.estimator} as a loss has an expected gradient of "
            f"zero: with --algo.kl.use_loss use {better}."
        )
    if not kl.use_loss and not kinds[kl.estimator].in_reward:
        better = " or ".join(name for name, kind in kinds.items() if kind.in_reward)
        return Derived(
            notice=f"--algo.kl.estimator {kl.estimator} is meant for --algo.kl.use_loss: in the "
            f"rewards use {better}."
        )
    return None


def clip_of_gspo(config: PPOConfig, request: Request) -> Derived | None:
    """The ratio of a whole sequence moves little: the paper clips at 3e-4 and 4e-4."""
    low, high = config.actor.eps_clip_low_high
    if config.actor.policy_loss_type != "gspo" or max(low, high) <= 0.01:
        return None
    return Derived(
        notice=f"With gspo a clip of {max(low, high):g} hardly ever binds: its paper uses "
        "--actor.eps_clip_low_high 3e-4 4e-4."
    )


def evaluation_that_never_runs(config: PPOConfig, request: Request) -> Derived | None:
    """RL evaluates only when told how often."""
    if config.eval.dataset is None or config.eval.steps > 0 or config.eval.at_start:
        return None
    return Derived(notice="--eval.dataset is never used: set --eval.steps or --eval.at_start.")


def the_plan(config: PPOConfig, request: Request) -> Derived | None:
    """How an iteration's samples become optimizer steps."""
    train, rollout = config.train, config.rollout
    steps = config.samples // train.batch_size * train.max_epochs
    micro = (
        f"micro-batches of {train.max_tokens_per_gpu} tokens"
        if train.dynamic_batch_enable
        else f"micro-batches of {train.micro_batch_size}"
    )
    return Derived(
        notice=f"Each iteration: {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} = "
        f"{config.samples} samples, {steps} optimizer step(s) of {train.batch_size} on "
        f"{config.actor_ranks} rank(s), {micro}."
    )


PPO_DERIVATIONS: tuple[Derivation[PPOConfig], ...] = (
    one_process_without_gpus,
    sharers_have_one_size,
    clip_range,
    muon_of_actor,
    muon_of_critic,
    agent_replaces_reward_function,
    critic_source,
    gamma_of_group_estimators,
    loss_aggregation,
    sizes_that_follow_others,
    packing_is_implied,
    engine_precision,
    prefix_caching,
    seeded_sampling,
    engines_sleep_only_when_colocated,
    engines_apart_when_async,
    kl_in_its_place,
    clip_of_gspo,
    evaluation_that_never_runs,
    the_plan,
)
