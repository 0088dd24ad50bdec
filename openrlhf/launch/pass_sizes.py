"""Checks an RL run's micro-batch sizes at startup.

A forward pass with a single sample leaves most of a device idle.
"""

from openrlhf.checks import Finding
from openrlhf.config.flags import value_at
from openrlhf.config.learning import RLTrainConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.settings import needs_old_logprobs

# Number of tokens per forward pass that keeps a GPU busy.
GPU_TOKENS = RLTrainConfig().max_tokens_per_gpu
CPU_TOKENS = 1024  # on a CPU, larger passes are hardly faster and need much more memory


def check_pass_sizes(config: PPOConfig, longest_prompt: int, *, on_gpus: bool) -> list[Finding]:
    """Return a notice if each micro-batch contains only one sample, even though more would fit.

    Sizes set by the user are not checked. `longest_prompt` is in tokens.
    """
    if config.train.dynamic_batch_enable:
        return []
    pass_tokens = CPU_TOKENS
    if on_gpus:
        pass_tokens = GPU_TOKENS
    max_len = config.data.max_len
    sample_tokens = min(max_len, longest_prompt + (config.rollout.max_new_tokens or max_len))
    batches = {"train.micro_batch_size": config.train.batch_size}
    if scores_samples(config):
        batches["rollout.micro_batch_size"] = config.samples
    single: list[str] = []
    for path, samples in batches.items():
        most = min(pass_tokens // sample_tokens, samples // config.data_slices)
        if path not in config.given and value_at(config, path) == 1 and most > 1:
            single.append(f"--{path} 1")
    if not single:
        return []
    seen = (
        f"Every sample runs in its own forward pass ({' and '.join(single)}). "
        f"The longest sample has at most {sample_tokens} tokens."
    )
    fix = (
        f"For passes of up to {pass_tokens} tokens, set --train.dynamic_batch_enable "
        f"--train.max_tokens_per_gpu {pass_tokens}, or raise these sizes. The results do not "
        "change, but each pass needs more memory."
    )
    return [Finding(seen, fix)]


def scores_samples(config: PPOConfig) -> bool:
    """Return whether the run scores samples in forward passes without gradients."""
    if config.has_frozen_policy or config.estimator_traits.needs_critic or config.reward.models:
        return True
    return needs_old_logprobs(config)
