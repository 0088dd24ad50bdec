"""Rules of RL: what is wrong with a resolved configuration, one function each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.config.rules import Rule, batch_fits_ranks, probabilities

if TYPE_CHECKING:
    from openrlhf.config.ppo import PPOConfig


def no_fp16(config: PPOConfig) -> str | None:
    """Engine and trainer must agree on every weight, and fp16 overflows in RL."""
    if config.ds.param_dtype != "fp16":
        return None
    return "--ds.param_dtype fp16 does not work in RL: use bf16, or fp32 on a CPU."


def engines_exist(config: PPOConfig) -> str | None:
    """Only engines generate."""
    if config.vllm.num_engines >= 1:
        return None
    return (
        f"--vllm.num_engines is {config.vllm.num_engines}, but only engines generate (generation "
        "by Transformers is gone): use 1 or more."
    )


def rewards_have_a_source(config: PPOConfig) -> str | None:
    """Something must score the samples."""
    reward = config.reward
    sources = (reward.model_name_or_path, reward.remote_url, reward.verifier, reward.process_model)
    if any(sources) or config.train.agent_func_path:
        return None
    return (
        "Nothing rewards the samples: give --reward.remote_url (a .py file or a URL), "
        "--reward.verifier, --reward.model_name_or_path or --train.agent_func_path."
    )


def reward_addresses(config: PPOConfig) -> Iterator[str]:
    """Either one Python file that is there, or URLs."""
    reward = config.reward
    for url in reward.urls:
        if not url.startswith(("http://", "https://")):
            yield f"--reward.remote_url {url} is neither an http(s) URL nor a .py file."
    if reward.function_path and len(reward.sources) > 1:
        yield f"--reward.remote_url {reward.remote_url} mixes a .py file with others: give one."
    if reward.function_path and not Path(reward.function_path).expanduser().is_file():
        yield f"--reward.remote_url {reward.function_path} does not exist on this machine."


def agent_file(config: PPOConfig) -> str | None:
    """The agent is a Python file that is there."""
    path = config.train.agent_func_path
    if path is None or (path.endswith(".py") and Path(path).expanduser().is_file()):
        return None
    return f"--train.agent_func_path {path} is not a .py file on this machine."


def reward_on_error(config: PPOConfig) -> str | None:
    """fail, drop or a number."""
    policy = config.reward.on_error
    if policy in ("fail", "drop"):
        return None
    try:
        float(policy)
    except ValueError:
        return f"--reward.on_error takes fail, drop or a number, not {policy!r}."
    return None


def groups_have_two(config: PPOConfig) -> str | None:
    """A comparison needs something to compare with."""
    n, name = config.rollout.n_samples_per_prompt, config.algo.advantage.estimator
    if not config.estimator.needs_groups or n > 1:
        return None
    return (
        f"--algo.advantage.estimator {name} compares samples of one prompt, but "
        f"--rollout.n_samples_per_prompt is {n}. Set it to 2 or more, or use reinforce."
    )


def filtering_has_groups(config: PPOConfig) -> str | None:
    """A prompt is judged by the mean of its samples."""
    n = config.rollout.n_samples_per_prompt
    if not config.algo.dynamic_filtering_enable or n > 1:
        return None
    return (
        "--algo.dynamic_filtering_enable judges a prompt by several samples, but "
        f"--rollout.n_samples_per_prompt is {n}. Set it to 2 or more."
    )


def ranges_go_up(config: PPOConfig) -> Iterator[str]:
    """Lower bounds lie below upper bounds."""
    advantage, algo = config.algo.advantage, config.algo
    ranges = {
        "algo.dynamic_filtering_range": algo.dynamic_filtering_range,
        "algo.advantage.is_correction_threshold": advantage.is_correction_threshold,
        "algo.correction.band": algo.correction.band,
        "reward.clip_range": config.reward.clip_range,
    }
    for path, bounds in ranges.items():
        if bounds is not None and bounds[0] >= bounds[1]:
            yield f"--{path} is {bounds[0]:g} {bounds[1]:g}: the first must be below the second."


def correction_is_complete(config: PPOConfig) -> str | None:
    """The three axes belong together."""
    correction = config.algo.correction
    axes = {"level": correction.level, "mode": correction.mode, "band": correction.band}
    missing = [f"--algo.correction.{name}" for name, value in axes.items() if value is None]
    if not missing or len(missing) == len(axes):
        return None
    return f"The correction also needs {' and '.join(missing)}."


def training_samples(config: PPOConfig) -> str | None:
    """Greedy decoding has no log-probabilities to train on."""
    if config.rollout.temperature > 0:
        return None
    return (
        "--rollout.temperature 0 is greedy, and log-probabilities at it do not exist. Use a value "
        "above 0; evaluation may be greedy: --eval.temperature 0."
    )


def response_leaves_room(config: PPOConfig) -> str | None:
    """A prompt needs tokens too."""
    new, total = config.rollout.max_new_tokens, config.data.max_len
    if new is None or new < total:
        return None
    return (
        f"--rollout.max_new_tokens {new} leaves no room for a prompt in --data.max_len {total}, "
        "which counts both. Raise data.max_len or lower it."
    )


def overlong_buffer_fits(config: PPOConfig) -> str | None:
    """The buffer is part of the response."""
    buffer = config.reward.overlong_buffer_len
    longest = config.rollout.max_new_tokens or config.data.max_len
    if buffer is None or buffer <= longest:
        return None
    return (
        f"--reward.overlong_buffer_len {buffer:g} is more than the longest response, {longest} "
        "tokens (--rollout.max_new_tokens, else --data.max_len)."
    )


def kl_target_has_a_start(config: PPOConfig) -> str | None:
    """An adaptive coefficient is multiplied, and there is no reference at 0."""
    if config.algo.kl.target is None or config.algo.kl.init_coef > 0:
        return None
    return "--algo.kl.target adapts --algo.kl.init_coef, which is 0: start above 0."


def batches_fit(config: PPOConfig) -> Iterator[str]:
    """An iteration is whole optimizer steps, and each of them whole micro-batches on every rank."""
    train, rollout = config.train, config.rollout
    product = (
        f"--rollout.batch_size {rollout.batch_size} x --rollout.n_samples_per_prompt "
        f"{rollout.n_samples_per_prompt} = {config.samples} samples"
    )
    if config.samples < train.batch_size:
        yield f"{product} are fewer than one --train.batch_size of {train.batch_size}: lower it."
    elif config.samples % train.batch_size:
        yield f"{product} are no multiple of --train.batch_size {train.batch_size}."
    actor = config.actor
    yield from batch_fits_ranks(
        config,
        config.actor_ranks,
        micro=1 if train.dynamic_batch_enable else train.micro_batch_size,
        what=f"--actor.num_nodes {actor.num_nodes} x "
        f"--actor.num_gpus_per_node {actor.num_gpus_per_node}",
    )
    ranks = config.data_parallel_ranks
    if not train.dynamic_batch_enable and config.samples // rollout.micro_batch_size < ranks:
        yield (
            f"{product} are fewer than --rollout.micro_batch_size {rollout.micro_batch_size} for "
            f"each of {ranks} ranks: lower it."
        )


def token_budget_holds_a_sample(config: PPOConfig) -> Iterator[str]:
    """A micro-batch of tokens holds at least one sample of full length."""
    if not config.train.dynamic_batch_enable:
        return
    group = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    budgets = {
        "train.max_tokens_per_gpu": config.train.max_tokens_per_gpu,
        "rollout.max_tokens_per_gpu": config.rollout.max_tokens_per_gpu,
    }
    for path, budget in budgets.items():
        if budget is not None and budget * group < config.data.max_len:
            yield (
                f"--{path} {budget} is less than one sample of --data.max_len "
                f"{config.data.max_len} tokens: raise it or lower data.max_len."
            )


def generation_feeds_training(config: PPOConfig) -> str | None:
    """A generation batch is a training batch; asynchronous runs may draw more."""
    drawn, size = config.rollout.vllm_generate_batch_size, config.rollout.batch_size
    if drawn == size or (drawn > size and config.train.async_enable):
        return None
    advice = "use --train.async_enable or lower it" if drawn > size else "raise it"
    return (
        f"--rollout.vllm_generate_batch_size {drawn} does not fit --rollout.batch_size {size}: "
        f"{advice}."
    )


def asynchronous_parts(config: PPOConfig) -> Iterator[str]:
    """What only works with, or only without, the asynchronous pipeline."""
    if config.train.partial_rollout_enable and not config.train.async_enable:
        yield "--train.partial_rollout_enable needs --train.async_enable."
    if config.train.async_enable and config.vllm.enable_sleep:
        yield "--vllm.enable_sleep does not work with --train.async_enable: engines never rest."


def engine_count_can_grow(config: PPOConfig) -> str | None:
    """Engines join; they do not leave."""
    if config.vllm.max_engines >= config.vllm.num_engines:
        return None
    return (
        f"--vllm.max_engines {config.vllm.max_engines} is below --vllm.num_engines "
        f"{config.vllm.num_engines}."
    )


def images_have_limits(config: PPOConfig) -> Iterator[str]:
    """Vision models come without critic and without packing."""
    if config.data.max_images_per_prompt == 0:
        return
    if config.estimator.needs_critic:
        yield (
            "--data.max_images_per_prompt works without a critic only: use another "
            f"--algo.advantage.estimator than {config.algo.advantage.estimator}."
        )
    if config.ds.packing_samples:
        yield (
            "--data.max_images_per_prompt does not work with --ds.packing_samples, which "
            "--train.dynamic_batch_enable and --ds.ring_attn_size turn on."
        )


def sharers_have_the_same_size(config: PPOConfig) -> Iterator[str]:
    """Roles share devices one to one."""
    train = config.train
    with_reference = config.algo.kl.init_coef > 0
    pairs: list[tuple[str, str, str]] = []
    if with_reference and (train.colocate_actor_ref or train.colocate_all):
        pairs.append(
            ("actor", "ref", "colocate_all" if train.colocate_all else "colocate_actor_ref")
        )
    if config.estimator.needs_critic and train.colocate_critic_reward:
        pairs.append(("critic", "reward", "colocate_critic_reward"))
    sizes = {
        "actor": (config.actor.num_nodes, config.actor.num_gpus_per_node),
        "ref": (config.ref.num_nodes, config.ref.num_gpus_per_node),
        "critic": (config.critic.num_nodes, config.critic.num_gpus_per_node),
        "reward": (config.reward.num_nodes, config.reward.num_gpus_per_node),
    }
    for owner, role, flag in pairs:
        if sizes[owner] != sizes[role]:
            yield (
                f"--train.{flag} needs equal sizes, but --{owner}.num_nodes x num_gpus_per_node is "
                f"{sizes[owner][0]} x {sizes[owner][1]} and --{role}'s {sizes[role][0]} x "
                f"{sizes[role][1]}."
            )


def engines_fill_the_shared_devices(config: PPOConfig) -> str | None:
    """In the hybrid engine every device has its share of an engine."""
    if not config.train.colocate_all or config.train.async_enable:
        return None
    vllm = config.vllm
    used = vllm.num_engines * vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    if used == config.actor_ranks:
        return None
    return (
        f"--train.colocate_all: --vllm.num_engines {vllm.num_engines} x tensor x pipeline "
        f"parallelism use {used} devices, but the policy has {config.actor_ranks} "
        "(--actor.num_nodes x --actor.num_gpus_per_node). Make them equal."
    )


PPO_RULES: tuple[Rule[PPOConfig], ...] = (
    no_fp16,
    engines_exist,
    rewards_have_a_source,
    reward_addresses,
    agent_file,
    reward_on_error,
    groups_have_two,
    filtering_has_groups,
    ranges_go_up,
    correction_is_complete,
    training_samples,
    response_leaves_room,
    overlong_buffer_fits,
    kl_target_has_a_start,
    batches_fit,
    token_budget_holds_a_sample,
    generation_feeds_training,
    asynchronous_parts,
    engine_count_can_grow,
    images_have_limits,
    sharers_have_the_same_size,
    engines_fill_the_shared_devices,
    probabilities("data.prompt_dataset", "data.prompt_probs"),
    probabilities("algo.ptx.dataset", "algo.ptx.probs"),
)
