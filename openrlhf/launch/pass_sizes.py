"""The check of RL's forward pass sizes at start: passes with a single sample leave most of a device
idle.
"""

from openrlhf.config.learning import RLTrainConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.findings import Finding, Level
from openrlhf.launch.settings import needs_old_logprobs

GPU_TOKENS = RLTrainConfig().max_tokens_per_gpu  # in a pass that keeps a device busy
CPU_TOKENS = 1024  # on a CPU, larger passes gain little and need much more memory
TRAINED, SCORED = "train.micro_batch_size", "rollout.micro_batch_size"


def check_pass_sizes(config: PPOConfig, longest_prompt: int, *, on_gpus: bool) -> Finding:
    """Return a warning if micro-batches have one sample by default, and several samples of a rank
    fit into a pass.

    `longest_prompt` is in tokens.
    """
    most = CPU_TOKENS
    if on_gpus:
        most = GPU_TOKENS
    sample = min(
        config.data.max_len, longest_prompt + (config.rollout.max_new_tokens or config.data.max_len)
    )
    sizes = advised_sizes(config, most // sample)
    if not sizes:
        return Finding(
            check="micro-batches", level=Level.PASS, seen="Forward passes have several samples."
        )
    alone = " and ".join(f"--{path} 1" for path in sizes)
    advice = " and ".join(f"--{path} {size}" for path, size in sizes.items())
    return Finding(
        check="micro-batches",
        level=Level.WARNING,
        seen=f"Every sample runs in its own forward pass ({alone}), and the longest has at most {sample} tokens.",
        fix=f"For passes of up to {most} tokens, set {advice}, or --train.dynamic_batch_enable "
        f"--train.max_tokens_per_gpu {most}. Results stay the same; each pass needs more memory.",
    )


def advised_sizes(config: PPOConfig, most: int) -> dict[str, int]:
    """Return larger sizes for the micro-batches that have one sample by default, by flag: at most
    `most` samples.
    """
    if config.train.dynamic_batch_enable:
        return {}
    ranks = config.data_slices
    sizes: dict[str, int] = {}
    of_rank = config.train.batch_size // ranks
    if TRAINED not in config.given and config.train.micro_batch_size == 1:
        sizes[TRAINED] = largest_divisor(of_rank, most)
    if (
        SCORED not in config.given
        and config.rollout.micro_batch_size == 1
        and scores_samples(config)
    ):
        sizes[SCORED] = min(most, config.samples // ranks)
    return {path: size for path, size in sizes.items() if size > 1}


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`; 1 if there is none."""
    divisors = [size for size in range(1, min(most, number) + 1) if number % size == 0]
    return max(divisors, default=1)


def scores_samples(config: PPOConfig) -> bool:
    """Return whether samples pass through a model without a gradient."""
    judged = config.has_frozen_policy or config.estimator.needs_critic or config.reward.models
    return bool(judged) or needs_old_logprobs(config)
