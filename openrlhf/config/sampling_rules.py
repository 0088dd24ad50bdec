"""Rules for rewards and engines. See the module `rules` for the definition of a rule."""

from collections.abc import Iterator

from openrlhf.config import machine
from openrlhf.config.engine_args import engine_args_violations
from openrlhf.config.rollout import (
    RemoteEnginesConfig,
    RewardConfig,
    RolloutConfig,
    RuleConfig,
    SamplingConfig,
    VLLMConfig,
)
from openrlhf.config.rules import has_host, is_file, is_number

NOTHING_REWARDS = (
    "The samples have no reward: set --reward.remote_url (a .py file or a URL), "
    "--reward.verifier, --reward.model_name_or_path, --reward.process_model or "
    "--train.agent_func_path."
)


def is_rewarded(reward: RewardConfig, agent: str | None) -> bool:
    """Return whether a function, server, verifier, model or agent rewards samples."""
    return bool(reward.remote_url or reward.verifier or agent or reward.models)


def reward_violations(reward: RewardConfig, agent: str | None) -> Iterator[str]:
    """Yield violations of the rules for everything that scores the samples."""
    if agent and reward.on_error not in ("fail", "drop"):
        yield (
            "<reward.on_error> cannot reward an episode that an agent did not finish: use fail or "
            "drop."
        )
    if agent and (reward.remote_url or reward.verifier):
        yield (
            "<train.agent_func_path> computes the rewards itself: leave out --reward.remote_url "
            "and --reward.verifier."
        )
    yield from source_violations(reward)
    if agent and not (agent.endswith(".py") and is_file(agent)):
        yield "<train.agent_func_path> is not a .py file on this machine."
    parts = len(reward.models)
    if reward.remote_url or reward.verifier or agent:
        parts += 1
    yield from sum_violations(reward, parts)


def source_violations(reward: RuleConfig) -> Iterator[str]:
    """Yield a violation unless the reward names URLs, an existing Python file, or a verifier."""
    if reward.remote_url and reward.verifier:
        yield (
            "<reward.remote_url> combined with <reward.verifier> is not available yet: leave out "
            "one of them."
        )
    if all(has_host(source) for source in reward.sources):
        return
    if len(reward.sources) > 1 or not is_file(reward.function_path):
        yield (
            "<reward.remote_url> must be http(s) URLs, or one .py file that exists on this machine."
        )


def label_violations(reward: RuleConfig, label_key: str | None) -> Iterator[str]:
    """Yield a violation if a verifier needs labels but no label column is set."""
    if reward.needs_labels and not label_key:
        yield (
            "<reward.verifier> checks responses against labels: set their column with "
            "--data.label_key."
        )


def sum_violations(reward: RewardConfig, parts: int) -> Iterator[str]:
    """Yield a violation unless there is one weight per reward and `on_error` is valid."""
    if reward.weights and len(reward.weights) != parts:
        yield (
            f"<reward.weights> has {len(reward.weights)} numbers for {parts} rewards: pass one "
            "per reward model, then one for --reward.process_model, then one for the function, "
            "server, verifier or agent."
        )
    if reward.on_error not in ("fail", "drop") and not is_number(reward.on_error):
        yield f"--reward.on_error takes fail, drop or a number, not {reward.on_error!r}."


def remote_engine_violations(rollout: RemoteEnginesConfig) -> Iterator[str]:
    """Yield a violation unless each remote engine has a unique name and a URL with a host."""
    wrong = [url for _, url in rollout.named_engines if not has_host(url)]
    if wrong:
        yield (
            f"--rollout.remote_engines {' '.join(wrong)} is not an http(s) URL: use "
            "NAME=http://host:port/v1."
        )
    if len(dict(rollout.named_engines)) < len(rollout.named_engines):
        yield "<rollout.remote_engines> contains a name twice: give each server a unique name."


def engine_violations(vllm: VLLMConfig, rollout: RolloutConfig, max_len: int) -> Iterator[str]:
    """Yield violations of the rules for engines, response lengths and extra vLLM arguments."""
    if vllm.max_engines < vllm.num_engines:
        yield "<vllm.max_engines> is less than <vllm.num_engines>: raise it, or leave it out."
    yield from room_violations(rollout, max_len)
    if vllm.sync_backend not in ("nccl", "gloo"):
        yield ("<vllm.sync_backend> is unknown: use nccl, or gloo, which goes through CPU memory.")
    if vllm.pipeline_parallel_size != 1 and not machine.count_gpus():
        yield (
            "<vllm.pipeline_parallel_size>: vLLM does not support pipeline parallelism on CPUs. "
            "Use 1."
        )
    if vllm.quantization and vllm.dtype == "fp32":
        yield (
            "<vllm.quantization> quantizes 16-bit weights and cannot be combined with "
            "<vllm.dtype>: use --vllm.dtype bf16."
        )
    yield from engine_args_violations(vllm, rollout, max_len)


def room_violations(sampling: SamplingConfig, max_len: int) -> Iterator[str]:
    """Yield a violation if a response leaves no room for its prompt."""
    if sampling.max_new_tokens and sampling.max_new_tokens >= max_len:
        yield (
            "<rollout.max_new_tokens> leaves no room for a prompt in <data.max_len>, which limits "
            "both together. Raise --data.max_len or lower --rollout.max_new_tokens."
        )
