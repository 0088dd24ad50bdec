"""RL rules by topic. See the module `rules` for the definition of a rule."""

import math
import os
from collections.abc import Iterator

from openrlhf.config import machine, sampling_rules, training_rules
from openrlhf.config.flags import value_at
from openrlhf.config.groups import role_groups, used_sections
from openrlhf.config.learning import RLFlags
from openrlhf.config.rules import probability_violations

RANGES = (
    "algo.dynamic_filtering_range",
    "algo.advantage.is_correction_threshold",
    "reward.clip_range",
)
LARGEST_SERVED_RANK = 512  # the maximum in vLLM


def violations(config: RLFlags) -> Iterator[str]:
    """Yield every violation in an RL configuration."""
    rules = (
        reward_violations,
        estimator_violations,
        loss_violations,
        range_violations,
        correction_violations,
        adapter_violations,
        async_violations,
        rollout_violations,
        batch_violations,
        device_violations,
    )
    yield from training_rules.router_violations(config.actor, "actor")
    for rule in rules:
        yield from rule(config)


def reward_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for rewards and teachers."""
    reward, agent, teacher = config.reward, config.train.agent_func_path, config.algo.distill
    taught = teacher.teacher or config.rollout.replay_dir
    if not taught and not sampling_rules.is_rewarded(reward, agent):
        yield sampling_rules.NOTHING_REWARDS
    yield from sampling_rules.reward_violations(reward, agent)
    if config.data.layout == "columns":
        yield from sampling_rules.label_violations(reward, config.data.label_key)
    if config.remote_teacher and config.rollout.temperature != 1:
        yield (
            "<rollout.temperature> cannot be combined with the server <algo.distill.teacher>, "
            "which returns log-probabilities only at temperature 1: use 1, or load the teacher "
            "with --algo.distill.teacher PATH."
        )
    longest = config.rollout.max_new_tokens or config.data.max_len
    if reward.overlong_buffer_len and reward.overlong_buffer_len > longest:
        yield (
            f"<reward.overlong_buffer_len> exceeds the maximum response length, {longest} tokens "
            "(--rollout.max_new_tokens, or --data.max_len if unset)."
        )


def estimator_violations(config: RLFlags) -> Iterator[str]:
    """Yield a violation if the estimator compares samples but there is only one."""
    if config.estimator_traits.per_batch and config.samples == 1:
        yield (
            "<algo.advantage.estimator> compares the samples of a batch, but <rollout.batch_size> "
            "x <rollout.n_samples_per_prompt> is 1: raise --rollout.batch_size."
        )
    if config.rollout.n_samples_per_prompt != 1:
        return
    if config.estimator_traits.per_group:
        yield (
            "<algo.advantage.estimator> compares the samples of a prompt, but "
            "--rollout.n_samples_per_prompt is 1. Set it to 2 or more, or use reinforce."
        )
    if config.algo.dynamic_filtering_enable:
        yield (
            "--algo.dynamic_filtering_enable filters prompts by the mean of several samples, but "
            "--rollout.n_samples_per_prompt is 1. Set it to 2 or more."
        )


def loss_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for loss terms and stopping criteria."""
    actor, kl, evaluation = config.actor, config.algo.kl, config.eval
    if actor.policy_loss_type == "cispo" and actor.dual_clip:
        yield (
            "<actor.dual_clip> cannot be combined with --actor.policy_loss_type cispo, which "
            "already bounds every weight: leave it out."
        )
    for source, coef in (
        ("algo.distill.teacher", "algo.distill.coef"),
        ("algo.ptx.dataset", "algo.ptx.coef"),
    ):
        if value_at(config, source) and not value_at(config, coef):
            yield (
                f"With <{coef}>, --{source} has no effect: raise the coefficient or leave out both "
                "flags."
            )
    for name in ("target", "stop_run"):
        if value_at(kl, name) and not kl.init_coef:
            yield (
                f"<algo.kl.{name}> needs the KL to the reference, but with --algo.kl.init_coef 0 "
                "no reference is loaded: use a coefficient above 0."
            )
    if evaluation.patience and evaluation.dataset and evaluation.steps in (-1, 0):
        yield "<eval.patience> requires evaluations during training: set --eval.steps."


def range_violations(config: RLFlags) -> Iterator[str]:
    """Yield a violation for each range whose bounds are not in increasing order."""
    for path in RANGES:
        bounds = value_at(config, path)
        if bounds and bounds[0] >= bounds[1]:
            yield (
                f"--{path} is {bounds[0]:g} {bounds[1]:g}: the first number must be less than the "
                "second."
            )


def correction_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for the correction of engine-trainer differences."""
    advantage = config.algo.advantage
    if not advantage.corrects or config.policy_loss_traits.rollout_ratio:
        return
    if advantage.is_correction_gating == "ratio":
        return
    if advantage.is_correction_mode == "clip":
        yield (
            "<algo.advantage.is_correction_mode> clips a ratio and cannot be combined with "
            "<algo.advantage.is_correction_gating>: use --algo.advantage.is_correction_mode mask, "
            "or --algo.advantage.is_correction_gating ratio."
        )
    if advantage.is_correction_level == "seq-product":
        yield (
            "<algo.advantage.is_correction_level> multiplies ratios and cannot be combined with "
            "<algo.advantage.is_correction_gating>: use --algo.advantage.is_correction_level seq."
        )
    if advantage.is_correction_threshold[0] > 0:
        yield (
            "<algo.advantage.is_correction_gating> has an upper bound only, but "
            "<algo.advantage.is_correction_threshold> also sets a lower bound above 0: pass a "
            "single number, such as --algo.advantage.is_correction_threshold 0.05."
        )


def adapter_violations(config: RLFlags) -> Iterator[str]:
    """Yield the reasons why engines cannot serve the adapter separately."""
    ds = config.ds
    if ds.lora.publish != "adapter":
        return
    if ds.lora.rank > LARGEST_SERVED_RANK:
        yield (
            f"<ds.lora.rank> is above {LARGEST_SERVED_RANK}, the maximum that engines support: "
            "lower it, or use --ds.lora.publish merged."
        )
    if ds.lora.dora:
        yield (
            "<ds.lora.publish>: engines cannot apply DoRA adapters (--ds.lora.dora): use merged."
        )
    if ds.load_in_4bit:
        yield (
            "<ds.lora.publish>: the adapter is trained on 4-bit weights (--ds.load_in_4bit), but "
            "engines would apply it to the original weights: use merged."
        )
    if config.vllm.pipeline_parallel_size != 1:
        yield (
            "<ds.lora.publish>: with <vllm.pipeline_parallel_size>, the pipeline stages of an "
            "engine do not report which layers they adapt: use merged, or "
            "--vllm.pipeline_parallel_size 1."
        )


def async_violations(config: RLFlags) -> Iterator[str]:
    """Yield a violation for each flag that asynchronous training does not support."""
    if not config.train.async_enable:
        return
    if config.given.get("vllm.enable_sleep"):
        yield (
            "--vllm.enable_sleep frees devices between rollouts, but with --train.async_enable "
            "engines never pause: leave it out."
        )
    for name in ("only", "dump_dir", "replay_dir"):
        if value_at(config.rollout, name):
            yield (
                f"<rollout.{name}> cannot be combined with --train.async_enable: leave out one of "
                "them."
            )


def rollout_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for engines and sampling."""
    rollout = config.rollout
    if rollout.temperature == 0:
        yield (
            "<rollout.temperature> selects greedy decoding, which gives no log-probabilities to "
            "train on. Use a value above 0. Evaluation may be greedy (--eval.temperature 0)."
        )
    if rollout.only and rollout.replay_dir:
        yield (
            "--rollout.only generates without training and <rollout.replay_dir> trains without "
            "generating: leave one of them out."
        )
    if rollout.replay_dir and not os.path.isdir(rollout.replay_dir):
        yield (
            "<rollout.replay_dir> is not a folder on this machine: write one with "
            "--rollout.dump_dir."
        )
    at_once = rollout.vllm_generate_batch_size
    if at_once < rollout.batch_size and not config.train.async_enable:
        yield (
            "<rollout.vllm_generate_batch_size> is less than <rollout.batch_size>: raise it, or "
            "leave it out."
        )
    if at_once > rollout.batch_size and (rollout.dump_dir or rollout.replay_dir):
        yield (
            "<rollout.vllm_generate_batch_size> generates for several steps at once, but each "
            "file of --rollout.dump_dir and --rollout.replay_dir holds one step: leave it out."
        )
    yield from sampling_rules.engine_violations(config.vllm, rollout, config.data.max_len)
    yield from sampling_rules.remote_engine_violations(rollout)


def batch_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for batch sizes and dataset probabilities."""
    train, rollout, samples = config.train, config.rollout, config.samples
    yield from probability_violations(config, "data.prompt_dataset", "data.prompt_probs")
    if rollout.only:
        return
    product = f"<rollout.batch_size> x <rollout.n_samples_per_prompt> = {samples} samples"
    if samples % max(1, train.batch_size):
        per_prompt = rollout.n_samples_per_prompt
        unit = train.batch_size // math.gcd(train.batch_size, per_prompt)
        prompts = math.ceil(rollout.batch_size / unit) * unit
        yield (
            f"{product} are not a multiple of <train.batch_size>, so not every optimizer step is "
            f"full. Set --rollout.batch_size {prompts} ({prompts * per_prompt} samples), or change "
            "--train.batch_size."
        )
    ranks = config.data_slices
    micro = train.micro_batch_size
    if train.dynamic_batch_enable:
        micro = 1
    elif samples < rollout.micro_batch_size * ranks:
        yield (
            f"{product} are fewer than <rollout.micro_batch_size> on each of {ranks} rank(s): "
            "lower the micro-batch size."
        )
    devices = "<actor.num_nodes> x <actor.num_gpus_per_node>"
    yield from training_rules.rank_violations(train.batch_size, ranks, micro=micro, what=devices)
    yield from probability_violations(config, "algo.ptx.dataset", "algo.ptx.probs")


def device_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for device sharing, engine placement and Ray resources."""
    if config.ds.enable_sleep and config.ds.zero_stage == 0:
        yield "<ds.enable_sleep> needs --ds.zero_stage 1, 2 or 3."
    for section in dict.fromkeys(used_sections(config).values()):
        group = value_at(config, section)
        ranks = group.num_nodes * group.num_gpus_per_node
        devices = f"<{section}.num_nodes> x <{section}.num_gpus_per_node>"
        yield from training_rules.slice_violations(config.ds, ranks, what=devices)
    yield from _training_violations(config)
    yield from _shared_device_violations(config)
    if config.hybrid and not (config.rollout.only or config.rollout.replay_dir):
        yield from _hybrid_violations(config)
    yield from _placement_violations(config)


def _training_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for optimizers and for the second copy of the weights."""
    roles = used_sections(config)
    for role in ("actor", "critic"):
        if role not in roles:
            continue
        model = value_at(config, role)
        yield from training_rules.optimizer_violations(model, config.ds, f"{role}.")
        ranks = model.num_nodes * model.num_gpus_per_node // max(1, config.ds.tensor_parallel_size)
        devices = f"<{role}.num_nodes> x <{role}.num_gpus_per_node>"
        yield from training_rules.partition_violations(config.ds, ranks, what=devices)


def _shared_device_violations(config: RLFlags) -> Iterator[str]:
    """Yield a violation if roles that share devices do not have the same number of processes."""
    switches = ("colocate_all", "colocate_actor_ref", "colocate_critic_reward")
    flags = [f"--train.{name}" for name in switches if value_at(config.train, name)]
    sections = used_sections(config)
    for group in role_groups(config):
        first, *others = [sections[role] for role in group.roles]
        expected = (group.size.num_nodes, group.size.num_gpus_per_node)
        for other in others:
            size = value_at(config, other)
            if (size.num_nodes, size.num_gpus_per_node) != expected:
                yield (
                    f"{' and '.join(flags)} requires equal sizes, but the sizes are "
                    f"<{first}.num_nodes> <{first}.num_gpus_per_node> and <{other}.num_nodes> "
                    f"<{other}.num_gpus_per_node>."
                )
                return


def _hybrid_violations(config: RLFlags) -> Iterator[str]:
    """Yield a violation if the engines do not fit on the devices of the models."""
    devices = max(1, config.vllm.devices)
    if config.vllm.num_engines * devices > config.actor_ranks:
        yield (
            "--train.colocate_all places the engines on the devices of the models, but "
            f"<vllm.num_engines> with {devices} device(s) each exceeds <actor.num_nodes> x "
            f"<actor.num_gpus_per_node> = {config.actor_ranks}. Lower --vllm.num_engines."
        )
    if config.actor.num_gpus_per_node % devices:
        yield (
            "With --train.colocate_all, the devices per engine must divide the devices per "
            f"machine, but {devices} does not divide <actor.num_gpus_per_node>. Change "
            "--vllm.tensor_parallel_size."
        )


def _placement_violations(config: RLFlags) -> Iterator[str]:
    """Yield violations of the rules for Ray resources and a declared cluster."""
    for role in ("actor", "ref", "critic", "reward", "vllm"):
        for name, amount in config.placement.wants([role]).items():
            is_amount = isinstance(amount, int | float) and amount > 0
            if not is_amount and not isinstance(amount, str):
                yield (
                    f"--placement.{role}.resources: {name} is {amount!r}; pass a number above 0 "
                    "for a Ray resource, or a string for a label."
                )
    cluster = config.placement.cluster
    if cluster and not config.dry_run:
        yield "<placement.cluster> plans for a different cluster and requires --dry_run."
    if cluster and not machine.declared_machines(cluster):
        yield (
            "<placement.cluster> does not describe a cluster: use, for example, 2x8 for two "
            "machines with 8 GPUs each."
        )
