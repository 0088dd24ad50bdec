"""What may be wrong with a configuration of RL; `rules` says what a row of sentences is."""

import os
from typing import Any

from openrlhf.config import choices, machine, rules
from openrlhf.config.effects import Sentences, combined
from openrlhf.config.engine_args import engine_args_mistakes
from openrlhf.config.flags import value_at
from openrlhf.config.learning import RLFlags


def correction_preset(config: RLFlags) -> dict[str, Any]:
    """The axes that `is_correction_type` and `is_correction_threshold` stand for, by path."""
    advantage = config.algo.advantage
    level, mode = choices.CORRECTIONS[advantage.is_correction_type]
    axes = {"level": level, "mode": mode, "band": advantage.is_correction_threshold}
    return {f"algo.correction.{name}": value for name, value in axes.items()}


# fmt: off
def algorithm_mistakes(config: RLFlags) -> Sentences:
    """Comparisons have something to compare, ranges go up, parts belong together."""
    algo = config.algo
    axes = vars(algo.correction)
    missing = [f"--algo.correction.{name}" for name in axes if axes[name] is None]
    ranges = ("algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold",
              "algo.correction.band", "reward.clip_range")
    return [
        *combined(config, "refused", "reinforcement"),
        *((low >= high, f"--{path} is {low:g} {high:g}: the first must be below the second.")
          for path in ranges for low, high in [value_at(config, path) or (0.0, 1.0)]),
        (0 < len(missing) < len(axes), f"The correction also needs {' and '.join(missing)}."),
        (algo.advantage.is_correction_enable
         and any(value_at(config, path) != value for path, value in correction_preset(config).items()),
         "--algo.advantage.is_correction_enable means the preset <algo.advantage.is_correction_type>, and "
         "--algo.correction.* says something else: give one of the two."),
    ]


def engine_mistakes(config: Any) -> Sentences:
    """Engines are there, a prompt has room in them, and their extra arguments leave
    log-probabilities alone.
    """
    extra = engine_args_mistakes(config.vllm, config.rollout, config.data.max_len)
    return [*combined(config, "refused", "engines"), *extra]


def rollout_mistakes(config: RLFlags) -> Sentences:
    """Engines can work, and a sample has log-probabilities, and is trained on."""
    rollout, data = config.rollout, config.data
    longest, overlong = rollout.max_new_tokens or data.max_len, config.reward.overlong_buffer_len
    return [
        *engine_mistakes(config),
        *rules.remote_engine_mistakes(rollout),
        (rollout.replay_dir and not os.path.isdir(rollout.replay_dir),
         "<rollout.replay_dir> is no folder on this machine: write one with --rollout.dump_dir."),
        (overlong and overlong > longest,
         f"<reward.overlong_buffer_len> is more than the longest response, {longest} tokens "
         "(--rollout.max_new_tokens, else --data.max_len)."),
    ]


def batch_mistakes(config: RLFlags) -> Sentences:
    """Batch sizes divide each other, and probabilities fit their datasets."""
    train, rollout, dynamic = config.train, config.rollout, config.train.dynamic_batch_enable
    product = f"<rollout.batch_size> x <rollout.n_samples_per_prompt> = {config.samples} samples"
    ranks = config.data_slices
    prompts = rules.probabilities_fit(config, "data.prompt_dataset", "data.prompt_probs")
    return prompts if rollout.only else [
        *prompts,
        (config.samples % max(1, train.batch_size), f"{product} are no multiple of <train.batch_size>: "
         "change one of them, so that every optimizer step is full."),
        *rules.batch_fits_ranks(
            train.batch_size, ranks, micro=1 if dynamic else train.micro_batch_size,
            what="<actor.num_nodes> x <actor.num_gpus_per_node>"),
        (not dynamic and config.samples < rollout.micro_batch_size * ranks,
         f"{product} are fewer than <rollout.micro_batch_size> for each of {ranks} rank(s): lower it."),
        *rules.probabilities_fit(config, "algo.ptx.dataset", "algo.ptx.probs"),
    ]


def device_mistakes(config: RLFlags) -> Sentences:
    """Roles that share devices have as many; engines fit on the devices that they share."""
    train, vllm, cluster = config.train, config.vllm, config.placement.cluster
    groups = {"actor": config.actor, "ref": config.ref, "critic": config.critic, "reward": config.reward}
    sizes = {role: (group.num_nodes, group.num_gpus_per_node) for role, group in groups.items()}
    used = {"actor": True, "ref": config.has_frozen_policy,
            "critic": config.estimator.needs_critic, "reward": config.reward.models}
    sharing = [[role for role in roles if used.get(role)] for roles in train.colocated]
    unequal = next(((roles[0], role) for roles in sharing for role in roles[1:]
                    if sizes[role] != sizes[roles[0]]), None)
    first, other = unequal or ("actor", "ref")
    wanted = [(role, name, amount) for role in (*groups, "vllm") for name, amount in config.placement.wants([role]).items()]
    wrong = [f"{name} of {role} is {amount!r}" for role, name, amount in wanted
             if not isinstance(amount, str) and not (isinstance(amount, int | float) and amount > 0)]
    flags = [name for name in ("colocate_all", "colocate_actor_ref", "colocate_critic_reward") if getattr(train, name)]
    devices, per_node = vllm.devices, config.actor.num_gpus_per_node
    engines = "<vllm.num_engines> x <vllm.tensor_parallel_size>" + (
        " x <vllm.pipeline_parallel_size>" if vllm.pipeline_parallel_size > 1 else "")
    hybrid = config.hybrid and not (config.rollout.only or config.rollout.replay_dir)
    return [
        (unequal, f"--train.{' and --train.'.join(flags)} needs equal sizes, but they are <{first}.num_nodes> "
         f"<{first}.num_gpus_per_node> and <{other}.num_nodes> <{other}.num_gpus_per_node>."),
        (hybrid and vllm.num_engines * devices > config.actor_ranks,
         f"--train.colocate_all has the engines on the devices of the models: {engines} = {vllm.num_engines * devices} are "
         f"more than <actor.num_nodes> x <actor.num_gpus_per_node> = {config.actor_ranks}. Lower --vllm.num_engines."),
        (hybrid and per_node % devices,
         f"With --train.colocate_all an engine shares devices of one machine: its {devices} do not divide "
         "<actor.num_gpus_per_node>. Change --vllm.tensor_parallel_size."),
        (wrong, f"--placement.*.resources: {', '.join(wrong)}; an amount above 0 is a Ray resource, a text is a label."),
        (cluster and not machine.declared_machines(cluster), "<placement.cluster> is no cluster: write 2x8 for two machines of 8 GPUs."),
    ]


RULES = (algorithm_mistakes, rollout_mistakes, batch_mistakes, device_mistakes)
