"""Derived values, notices and rules of RL; `rules` says what a row of sentences is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.config import choices, machine, rules
from openrlhf.config.engine_args import engine_args_mistakes
from openrlhf.config.flags import value_at
from openrlhf.config.rules import Given, Replaced, Sentences

if TYPE_CHECKING:
    from openrlhf.config.ppo import PPOConfig
    from openrlhf.config.rollout import RolloutConfig, VLLMConfig


def group_sizes(config: PPOConfig, given: Given) -> dict[str, int]:
    """One process where no GPU is; a role that shares another's devices has its size."""
    train, leaves = config.train, ("num_nodes", "num_gpus_per_node")
    roles = ("actor", "critic", "ref", "reward")
    sizes = {f"{r}.{leaf}": value_at(config, f"{r}.{leaf}") for r in roles for leaf in leaves}
    if machine.count_gpus() == 0:
        sizes |= {path: 1 for path in sizes if path.endswith(leaves[1]) and path not in given}
    owners = {"reward": "critic"} if train.colocate_critic_reward else {}
    owners |= {"ref": "actor"} if train.colocate_actor_ref else {}
    owners |= dict.fromkeys(("ref", "critic", "reward"), "actor") if train.colocate_all else {}
    for role, owner in owners.items():
        inherited = {f"{role}.{leaf}": sizes[f"{owner}.{leaf}"] for leaf in leaves}
        sizes |= {path: size for path, size in inherited.items() if path not in given}
    return sizes


def learning_values(config: PPOConfig, given: Given) -> dict[str, Any]:
    """What follows for rewards, critic and losses, by path."""
    actor, train, reward = config.actor, config.train, config.reward
    gamma, loss = config.algo.advantage.gamma, choices.POLICY_LOSSES[actor.policy_loss_type]
    clip = None if "actor.eps_clip" in given else loss.clip
    models = [config.critic.model_name_or_path, *rules.items(reward.model_name_or_path)]
    critic = next(filter(None, models), actor.model_name_or_path)
    advantage, preset = config.algo.advantage, correction_preset(config)
    unless_given = {
        "actor.eps_clip_low_high": clip or (actor.eps_clip, actor.eps_clip),
        "algo.loss.aggregation": loss.aggregation,
    } | (preset if advantage.is_correction_enable else {})
    return {path: value for path, value in unless_given.items() if path not in given} | {
        "critic.model_name_or_path": critic if config.estimator.needs_critic else None,
        "reward.remote_url": None if train.agent_func_path else reward.remote_url,
        "reward.workers": reward.workers or os.cpu_count() or 1,
        "algo.advantage.gamma": 1.0 if config.estimator.forces_gamma_one else gamma,
        "train.max_staleness": train.max_staleness or train.async_queue_size,
        "ckpt.load_enable": config.ckpt.load_enable and not config.rollout.only,
    }


def correction_preset(config: PPOConfig) -> dict[str, Any]:
    """The axes that `is_correction_type` and `is_correction_threshold` stand for, by path."""
    advantage = config.algo.advantage
    preset = choices.CORRECTIONS[advantage.is_correction_type]
    axes = {"level": preset.level, "mode": preset.mode, "band": advantage.is_correction_threshold}
    return {f"algo.correction.{name}": value for name, value in axes.items()}


def rollout_values(config: PPOConfig) -> dict[str, Any]:
    """What follows for engines, sampling and micro-batches, by path."""
    train, rollout, vllm, ds = config.train, config.rollout, config.vllm, config.ds
    tokens = train.max_tokens_per_gpu if train.dynamic_batch_enable else None
    shared = rollout.n_samples_per_prompt > 1 or train.agent_func_path is not None
    return engine_values(vllm, rollout, ds.param_dtype, shared=shared) | {
        "rollout.max_tokens_per_gpu": rollout.max_tokens_per_gpu or tokens,
        "vllm.enable_sleep": vllm.enable_sleep and train.colocate_all,
        "ds.packing_samples": (ds.packing_samples or train.dynamic_batch_enable or ds.ring_attn_size > 1),
    }


def engine_values(vllm: VLLMConfig, rollout: RolloutConfig, param_dtype: str, *, shared: bool) -> dict[str, Any]:
    """What follows for engines wherever there are any; `shared`: samples share prefixes."""
    seeded = "off" if machine.count_gpus() else "on"  # on GPUs it costs time and is not exact
    follows = vllm.dtype == "auto" and param_dtype != "fp16"  # which a rule refuses
    return {
        "rollout.vllm_generate_batch_size": rollout.vllm_generate_batch_size or rollout.batch_size,
        "rollout.seeded": seeded if rollout.seeded == "auto" else rollout.seeded,
        "vllm.max_engines": vllm.max_engines or vllm.num_engines,
        "vllm.dtype": param_dtype if follows else vllm.dtype,
        "vllm.enable_prefix_caching": (vllm.enable_prefix_caching or shared) and not vllm.disable_prefix_caching,
    }


# fmt: off
def device_notices(config: PPOConfig, replaced: Replaced, given: Given) -> Sentences:
    """Where processes run, what they share, and how samples become optimizer steps."""
    train, rollout, leaf = config.train, config.rollout, "num_gpus_per_node"
    trains = not rollout.only
    used = {"actor": trains, "ref": trains and config.algo.kl.init_coef > 0,
            "critic": trains and config.estimator.needs_critic, "reward": config.reward.model_name_or_path}
    unset = [f"--{r}.{leaf}" for r in used if used[r] and f"{r}.{leaf}" not in given]
    dynamic = train.dynamic_batch_enable
    cause = "train.dynamic_batch_enable" if dynamic else "ds.ring_attn_size"
    micro = f"{train.max_tokens_per_gpu} tokens" if dynamic else train.micro_batch_size
    steps = config.samples // max(1, train.batch_size) * train.max_epochs
    ahead = rollout.vllm_generate_batch_size > rollout.batch_size
    return [
        (unset and not machine.count_gpus(), f"No GPU on this machine: {', '.join(unset)} is 1."),
        ("ds.packing_samples" in replaced, f"--{cause} turns --ds.packing_samples on."),
        ("vllm.enable_sleep" in replaced,
         "--vllm.enable_sleep is off: it needs --train.colocate_all."),
        ("vllm.enable_prefix_caching" in replaced and config.vllm.disable_prefix_caching,
         "--vllm.disable_prefix_caching wins over --vllm.enable_prefix_caching."),
        (train.colocate_all and train.async_enable, "With --train.async_enable, "
         "--train.colocate_all joins trained models only; engines have devices of their own."),
        (trains and ahead, f"--rollout.vllm_generate_batch_size {rollout.vllm_generate_batch_size} generates for more than one step: "
         "the later ones train on samples of older weights"
         + ("." if config.algo.advantage.is_correction_enable else
            ". Without --algo.advantage.is_correction_enable the loss is not corrected for that.")),
        (trains, f"Each iteration: {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} = "
         f"{config.samples} samples, {steps} optimizer step(s) of {train.batch_size} on "
         f"{config.actor_ranks} rank(s), micro-batches of {micro}."),
    ]


def algorithm_notices(config: PPOConfig, replaced: Replaced, given: Given) -> Sentences:
    """What is not used, or used in an unusual way."""
    actor, evaluation, critic = config.actor, config.eval, config.estimator.needs_critic
    clip, both = actor.eps_clip_low_high, {"actor.eps_clip", "actor.eps_clip_low_high"} <= given
    gamma, kl, kinds = replaced.get("algo.advantage.gamma"), config.algo.kl, choices.KL_ESTIMATORS
    in_loss = [name for name in kinds if kinds[name].in_loss]
    in_reward = [name for name in kinds if kinds[name].in_reward]
    return [
        (both and clip != (actor.eps_clip, actor.eps_clip),
         "--actor.eps_clip has no effect beside --actor.eps_clip_low_high."),
        (actor.policy_loss_type == "gspo" and max(clip) > 0.01,  # ratios of sequences move little
         "With gspo <actor.eps_clip_low_high> hardly ever binds: its paper uses 3e-4 4e-4."),
        *rules.muon_notices("actor.", actor),
        *(rules.muon_notices("critic.", config.critic) if critic else []),
        (not critic and "critic.model_name_or_path" in replaced,
         "--critic.model_name_or_path is not used: <algo.advantage.estimator> has no critic."),
        (gamma is not None,
         f"--algo.advantage.gamma {gamma} is not used: <algo.advantage.estimator> takes 1."),
        (kl.init_coef and kl.use_loss and kl.estimator not in in_loss,
         "<algo.kl.estimator> as a loss has an expected gradient of zero: with --algo.kl.use_loss "
         f"use {' or '.join(in_loss)}."),
        (kl.init_coef and not kl.use_loss and kl.estimator not in in_reward,
         "<algo.kl.estimator> is meant for --algo.kl.use_loss: in the rewards use "
         f"{' or '.join(in_reward)}."),
        (config.vllm.quantization and config.algo.correction.level is None,
         "With <vllm.quantization> samples come from rounded weights, not quite the policy's: "
         "--algo.advantage.is_correction_enable corrects the loss for it."),
        ("algo.advantage.is_correction_type" in given and not config.algo.advantage.is_correction_enable,
         "--algo.advantage.is_correction_type has no effect without --algo.advantage.is_correction_enable."),
        (kl.stop_update and config.samples * config.train.max_epochs <= config.train.batch_size,
         "--algo.kl.stop_update has no effect: each batch makes one optimizer step."),
        (config.algo.distill.teacher and critic and not rewards(config),
         "Only --algo.distill.teacher teaches, and there are no rewards that a critic could predict: use "
         "--algo.advantage.estimator reinforce."),
        ({"algo.ptx.coef", "algo.ptx.probs", "algo.ptx.split"} & given and not config.algo.ptx.dataset,
         "--algo.ptx.coef, .probs and .split have no effect without --algo.ptx.dataset."),
        (config.reward.function_path and not config.data.label_key,
         "--data.label_key is not given: the labels that the reward function gets are empty."),
        ("reward.remote_url" in replaced,
         "--reward.remote_url is not used: the agent of --train.agent_func_path rewards."),
        ("critic.freezing_steps" in given and not critic,
         "--critic.freezing_steps has no effect: <algo.advantage.estimator> has no critic."),
        ("algo.dynamic_filtering_range" in given and not config.algo.dynamic_filtering_enable,
         "--algo.dynamic_filtering_range has no effect without --algo.dynamic_filtering_enable."),
        ("reward.retries" in given and not (config.reward.urls or config.rollout.remote_engines),
         "--reward.retries has no effect: only servers are asked again."),
        *rules.remote_engine_notices(
            config.rollout, used=config.train.agent_func_path or config.reward.function_path or config.remote_teacher),
        (evaluation.dataset and evaluation.steps <= 0 and not evaluation.at_start,
         "--eval.dataset is never used: set --eval.steps or --eval.at_start."),
        ("train.ema_beta" in given and not config.train.enable_ema,
         "--train.ema_beta has no effect without --train.enable_ema."),
    ]


OF_TRAINING = ("actor.", "critic.", "ref.", "algo.", "train.", "eval.", "ckpt.")
WITHOUT_TRAINING = (  # what is used of these all the same, the last two by reward models
    "actor.model_name_or_path", "algo.advantage.estimator", "algo.dynamic_filtering", "train.seed", "train.num_episodes",
    "train.setup_timeout", "train.step_timeout", "train.full_determinism_enable",
    "train.agent_func_path", "train.dynamic_batch_enable", "train.max_tokens_per_gpu",
)
OF_ENGINES = (
    "vllm.", "eval.", "train.agent_func_path", "rollout.max_turns", "rollout.step_timeout", "rollout.episode_timeout",
    "rollout.dump_dir", "rollout.top_", "rollout.stop", "rollout.seeded", "reward.remote_url",
    "reward.verifier", "reward.batch", "reward.timeout", "reward.retries", "reward.workers", "reward.memory_gib",
)


def half_notices(config: PPOConfig, given: Given) -> Sentences:
    """Flags of the other half, where a run only generates or only trains."""
    rollout = config.rollout

    def unused(half: tuple[str, ...], used: tuple[str, ...] = ()) -> str:
        flags = [f"--{path}" for path in sorted(given) if path.startswith(half) and not path.startswith(used)]
        more = [f"{len(flags) - 8} more"] if len(flags) > 8 else []
        return f" No effect: {', '.join([*flags[:8], *more])}." if flags else ""

    return [
        (rollout.only, "--rollout.only trains, evaluates and saves nothing." + unused(OF_TRAINING, WITHOUT_TRAINING)),
        (rollout.replay_dir, "A replay starts no engine and calls no reward function or agent; nothing is evaluated, which would "
         "take engines." + unused(OF_ENGINES)),
    ]


def rewards(config: PPOConfig) -> bool:
    """Whether something scores the samples."""
    reward = config.reward
    sources = (reward.model_name_or_path, reward.remote_url, reward.verifier, reward.process_model)
    return any((*sources, config.train.agent_func_path))


def reward_mistakes(config: PPOConfig) -> Sentences:
    """Something scores the samples: models, URLs, one Python file that is there, an agent."""
    reward, agent = config.reward, config.train.agent_func_path
    parts = len(reward.models) + bool(reward.remote_url or reward.verifier or agent)
    return [
        (not rewards(config) and not config.algo.distill.teacher and not config.rollout.replay_dir,
         "Nothing rewards the samples: give --reward.remote_url (a .py file or a URL), "
         "--reward.verifier, --reward.model_name_or_path or --train.agent_func_path."),
        *rules.rule_mistakes(reward, config.data.label_key),
        *rules.agent_mistakes(agent, reward),
        *rules.sum_mistakes(reward, parts),
    ]


def algorithm_mistakes(config: PPOConfig) -> Sentences:
    """Comparisons have something to compare, ranges go up, parts belong together."""
    algo, alone = config.algo, config.rollout.n_samples_per_prompt < 2
    axes = vars(algo.correction)
    missing = [f"--algo.correction.{name}" for name in axes if axes[name] is None]
    ranges = ("algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold",
              "algo.correction.band", "reward.clip_range")
    return [
        (config.estimator.needs_groups and alone,
         "<algo.advantage.estimator> compares samples of one prompt, but "
         "--rollout.n_samples_per_prompt is 1. Set it to 2 or more, or use reinforce."),
        (algo.dynamic_filtering_enable and alone,
         "--algo.dynamic_filtering_enable judges a prompt by several samples, but "
         "--rollout.n_samples_per_prompt is 1. Set it to 2 or more."),
        *((low >= high, f"--{path} is {low:g} {high:g}: the first must be below the second.")
          for path in ranges for low, high in [value_at(config, path) or (0.0, 1.0)]),
        *rules.balance_reaches_routers("actor", config.actor),
        (0 < len(missing) < len(axes), f"The correction also needs {' and '.join(missing)}."),
        (algo.advantage.is_correction_enable
         and any(value_at(config, path) != value for path, value in correction_preset(config).items()),
         "--algo.advantage.is_correction_enable means the preset <algo.advantage.is_correction_type>, and "
         "--algo.correction.* says something else: give one of the two."),
        (config.actor.policy_loss_type == "cispo" and config.actor.dual_clip,
         "<actor.dual_clip> has no meaning with --actor.policy_loss_type cispo, which bounds every weight: leave it out."),
        (algo.distill.teacher and not algo.distill.coef,
         "<algo.distill.coef> makes --algo.distill.teacher useless: raise it, or leave both out."),
        (config.remote_teacher and config.rollout.temperature != 1,
         "<rollout.temperature> is another than that of the server of <algo.distill.teacher>, which knows log-probabilities "
         "at 1 only: use 1, or a teacher that is loaded here: --algo.distill.teacher PATH."),
        (algo.ptx.dataset and not algo.ptx.coef,
         "<algo.ptx.coef> makes --algo.ptx.dataset useless: raise it, or leave both out."),
        (algo.kl.stop_run and not algo.kl.init_coef,
         "<algo.kl.stop_run> watches the KL to the reference, which --algo.kl.init_coef 0 does not load: start above 0."),
        (config.eval.patience and config.eval.dataset and config.eval.steps < 1,
         "<eval.patience> waits for a better evaluation: set --eval.steps."),
        (algo.kl.target and not algo.kl.init_coef,
         "--algo.kl.target adapts --algo.kl.init_coef, which is 0: start above 0."),
    ]


def engine_mistakes(vllm: VLLMConfig, rollout: RolloutConfig, max_len: int) -> Sentences:
    """Engines are there, and a prompt has room in them."""
    return [
        (vllm.num_engines < 1, f"--vllm.num_engines is {vllm.num_engines}, but only engines "
         "generate (generation by Transformers is gone): use 1 or more."),
        (rollout.max_new_tokens and rollout.max_new_tokens >= max_len,
         "<rollout.max_new_tokens> leaves no room for a prompt in <data.max_len>, which counts "
         "both. Raise data.max_len or lower it."),
    ]


def rollout_mistakes(config: PPOConfig) -> Sentences:
    """Engines can work, and a sample has log-probabilities, and is trained on."""
    vllm, rollout, data, train = config.vllm, config.rollout, config.data, config.train
    drawn, batch = rollout.vllm_generate_batch_size, rollout.batch_size
    longest, overlong = rollout.max_new_tokens or data.max_len, config.reward.overlong_buffer_len
    return [
        *engine_mistakes(vllm, rollout, data.max_len),
        *rules.remote_engine_mistakes(rollout),
        (rollout.only and rollout.replay_dir,
         "--rollout.only generates and <rollout.replay_dir> trains from what was generated: give one of them."),
        (rollout.replay_dir and not Path(rollout.replay_dir).expanduser().is_dir(),
         "<rollout.replay_dir> is no folder on this machine: write one with --rollout.dump_dir."),
        (vllm.max_engines < vllm.num_engines, "<vllm.max_engines> is below <vllm.num_engines>."),
        (rollout.temperature == 0,
         "<rollout.temperature> is greedy, and log-probabilities at it do not exist. Use a value "
         "above 0; evaluation may be greedy: --eval.temperature 0."),
        (overlong and overlong > longest,
         f"<reward.overlong_buffer_len> is more than the longest response, {longest} tokens "
         "(--rollout.max_new_tokens, else --data.max_len)."),
        (data.max_images_per_prompt and config.estimator.needs_critic,
         "--data.max_images_per_prompt works without a critic only: use another "
         f"--algo.advantage.estimator than {config.algo.advantage.estimator}."),
        (data.max_images_per_prompt and config.ds.packing_samples,
         "--data.max_images_per_prompt does not work with --ds.packing_samples, which "
         "--train.dynamic_batch_enable and --ds.ring_attn_size turn on."),
        (drawn < batch, "<rollout.vllm_generate_batch_size> is less than <rollout.batch_size>: raise it, or leave it out."),
        (drawn > batch and (rollout.dump_dir or rollout.replay_dir),
         "<rollout.vllm_generate_batch_size> generates for several steps at once, and the files of --rollout.dump_dir and "
         "--rollout.replay_dir are of one step each: leave it out."),
        (train.partial_rollout_enable and not train.async_enable,
         "--train.partial_rollout_enable needs --train.async_enable."),
        (train.async_enable and vllm.enable_sleep,
         "--vllm.enable_sleep does not work with --train.async_enable: engines never rest."),
    ]


def batch_mistakes(config: PPOConfig) -> Sentences:
    """An iteration is whole optimizer steps, these whole micro-batches; shares of datasets fit."""
    train, rollout, dynamic = config.train, config.rollout, config.train.dynamic_batch_enable
    product = f"<rollout.batch_size> x <rollout.n_samples_per_prompt> = {config.samples} samples"
    group, enough = config.ds.group_size, config.samples >= train.batch_size
    ranks = max(1, config.actor_ranks // group)
    budgets = {"train": train.max_tokens_per_gpu, "rollout": rollout.max_tokens_per_gpu or 0}
    prompts = rules.probabilities_fit(config, "data.prompt_dataset", "data.prompt_probs")
    return prompts if rollout.only else [
        *prompts,
        (not enough,
         f"{product} are fewer than one --train.batch_size of {train.batch_size}: lower it."),
        (enough and config.samples % max(1, train.batch_size),
         f"{product} are no multiple of <train.batch_size>."),
        *rules.batch_fits_ranks(
            config, config.actor_ranks, micro=1 if dynamic else train.micro_batch_size,
            what="<actor.num_nodes> x <actor.num_gpus_per_node>"),
        (not dynamic and config.samples < rollout.micro_batch_size * ranks,
         f"{product} are fewer than <rollout.micro_batch_size> for each of {ranks} rank(s)."),
        *((dynamic and budgets[name] * group < config.data.max_len,
           f"<{name}.max_tokens_per_gpu> is less than one sample of <data.max_len> tokens: raise "
           "it or lower data.max_len.") for name in budgets),
        *rules.probabilities_fit(config, "algo.ptx.dataset", "algo.ptx.probs"),
    ]


def device_mistakes(config: PPOConfig) -> Sentences:
    """Roles share devices one to one, and engines fill those of the hybrid engine."""
    train, vllm, everything = config.train, config.vllm, config.train.colocate_all
    used = vllm.num_engines * vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    sharing = {  # flag: owner, role, whether both are there
        "colocate_all": ("actor", "ref", config.algo.kl.init_coef > 0),
        "colocate_actor_ref": ("actor", "ref", config.algo.kl.init_coef > 0 and not everything),
        "colocate_critic_reward": ("critic", "reward", config.estimator.needs_critic),
    }

    def size(role: str) -> str:
        return "{0.num_nodes} x {0.num_gpus_per_node}".format(value_at(config, role))

    return [
        *((value_at(train, flag) and both and size(owner) != size(role),
           f"--train.{flag} needs equal sizes, but --{owner}.num_nodes x num_gpus_per_node is "
           f"{size(owner)} and --{role}'s {size(role)}.")
          for flag, (owner, role, both) in sharing.items()),
        (everything and not train.async_enable and used != config.actor_ranks,
         f"--train.colocate_all: <vllm.num_engines> x tensor x pipeline parallelism use {used} "
         f"devices, but the policy has {config.actor_ranks} (--actor.num_nodes x "
         "--actor.num_gpus_per_node). Make them equal."),
    ]


RULES = (reward_mistakes, algorithm_mistakes, rollout_mistakes, engine_args_mistakes, batch_mistakes, device_mistakes)
