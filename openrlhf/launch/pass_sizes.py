"""Startup check of the micro-batch sizes of an RL run.

A forward pass with a single sample leaves most of a device idle.
"""

from openrlhf.checks import Finding
from openrlhf.config.learning import RLTrainConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.settings import needs_old_logprobs

# Number of tokens per forward pass that keeps a GPU busy.
GPU_TOKENS = RLTrainConfig().max_tokens_per_gpu
CPU_TOKENS = 1024  # on a CPU, larger passes have hardly more throughput and need much more memory
TRAINED = "train.micro_batch_size"
SCORED = "rollout.micro_batch_size"


def check_pass_sizes(config: PPOConfig, longest_prompt: int, *, on_gpus: bool) -> list[Finding]:
    """Return a notice if micro-batches contain one sample although more would fit.

    Sizes set by the user are not checked. `longest_prompt` is in tokens.
    """
    pass_tokens = CPU_TOKENS
    if on_gpus:
        pass_tokens = GPU_TOKENS
    max_len = config.data.max_len
    sample_tokens = min(max_len, longest_prompt + (config.rollout.max_new_tokens or max_len))
    sizes = advised_sizes(config, pass_tokens // sample_tokens)
    if not sizes:
        return []
    current = " and ".join(f"--{path} 1" for path in sizes)
    advice = " and ".join(f"--{path} {size}" for path, size in sizes.items())
    seen = (
        f"Every sample runs in its own forward pass ({current}). The longest sample has at most "
        f"{sample_tokens} tokens."
    )
    fix = (
        f"For passes of up to {pass_tokens} tokens, set {advice}, or "
        f"--train.dynamic_batch_enable --train.max_tokens_per_gpu {pass_tokens}. "
        "The results do not change; each pass needs more memory."
    )
    return [Finding(seen, fix)]


def advised_sizes(config: PPOConfig, most: int) -> dict[str, int]:
    """Return larger sizes, by flag, for micro-batches that contain one sample by default.

    Each size is at most `most` samples.
    """
    sizes: dict[str, int] = {}
    if config.train.dynamic_batch_enable:
        return sizes
    ranks = config.data_slices
    if TRAINED not in config.given and config.train.micro_batch_size == 1:
        size = largest_divisor(config.train.batch_size // ranks, most)
        if size > 1:
            sizes[TRAINED] = size
    if SCORED not in config.given and config.rollout.micro_batch_size == 1:
        size = min(most, config.samples // ranks)
        if size > 1 and scores_samples(config):
            sizes[SCORED] = size
    return sizes


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, or 1."""
    for size in range(min(most, number), 1, -1):
        if number % size == 0:
            return size
    return 1


def scores_samples(config: PPOConfig) -> bool:
    """Return whether the run scores samples in forward passes without gradients."""
    if config.has_frozen_policy or config.estimator.needs_critic or config.reward.models:
        return True
    return needs_old_logprobs(config)
