"""RL configuration sections for generation: engines, sampling, rewards, placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from openrlhf.config import machine
from openrlhf.config.flags import (
    Section,
    Unused,
    count,
    items,
    option,
    required,
    switch,
    unset,
    value_at,
)

# Phrases for notices about what a flag requires.
AGENT = "--train.agent_func_path"
FUNCTION = "--reward.remote_url FILE.py"
VERIFIER = "--reward.verifier"


class VLLMConfig(Section):
    """Rollout engines (vLLM)."""

    num_engines: int = count(1, "Number of engines.")
    max_engines: int = unset(
        "Maximum number of engines, including those that join later; unset: vllm.num_engines.", ge=1
    )
    max_restarts: int = option(3, "Maximum restarts of an engine before the run fails.", ge=0)
    hang_timeout: float = option(
        600.0, "Restart an engine that has not responded for this many seconds.", ge=1
    )
    tensor_parallel_size: int = count(
        1, "Tensor-parallel size: GPUs that each layer of an engine is split across."
    )
    pipeline_parallel_size: int = count(
        1, "Pipeline-parallel size: stages that the layers of an engine are split into."
    )
    dtype: str = option(
        "auto", "Data type; auto: ds.param_dtype.", choices=("auto", "fp32", "bf16")
    )
    quantization: str | None = unset("vLLM quantization method, such as fp8.")
    gpu_memory_utilization: float = option(
        0.95, "Fraction of each GPU's memory that an engine may use.", gt=0, le=1
    )
    enforce_eager: bool = switch("Disable CUDA graphs.")
    enable_prefix_caching: bool = switch(
        "Enable prefix caching; always on with agents or several samples per prompt.",
        unless="disable_prefix_caching",
    )
    disable_prefix_caching: bool = switch("Disable prefix caching, regardless of other flags.")
    enable_sleep: bool = switch("Free GPU memory between rollouts.")
    sync_backend: str = option("nccl", "Transport for weight updates; gloo without GPUs.")
    sync_with_ray: bool = switch("No effect: weights are never sent through Ray.", obsolete=True)
    engine_args: Mapping[str, Any] = option({}, "Additional vLLM engine arguments.", metavar="JSON")

    @property
    def devices(self) -> int:
        """The number of devices per engine, one for each of its workers."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not machine.count_gpus():
            yield Unused(["gpu_memory_utilization", "enforce_eager"], "without a GPU")


class RemoteEnginesConfig(Section):
    """Engines outside the run."""

    remote_engines: tuple[str, ...] = option(
        (),
        "OpenAI-compatible servers that agents and reward functions call by name, e.g. "
        "judge=http://host:8000/v1. Without a name, a server is named by its position, starting "
        "at 0.",
        metavar="NAME=URL",
    )

    @property
    def named_engines(self) -> list[tuple[str, str]]:
        """The name and the URL of each remote engine."""
        engines: list[tuple[str, str]] = []
        for place, text in enumerate(self.remote_engines):
            name, _, url = text.partition("=")
            if name and url and "://" not in name:
                engines.append((name, url))
            else:
                engines.append((str(place), text))
        return engines


class SamplingConfig(Section):
    """Sampling."""

    max_new_tokens: int | None = unset(
        "Maximum tokens per response; unset: data.max_len minus the prompt.", ge=1
    )
    temperature: float = option(
        1.0, "Sampling temperature, also applied to log-probabilities.", ge=0, le=2
    )
    top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this total probability.", gt=0, le=1
    )
    top_k: int = option(-1, "Sample from the top k tokens; -1: all.", ge=-1)
    stop: tuple[str, ...] = option((), "Stop strings that end a response.")
    stop_token_ids: tuple[int, ...] = option((), "Ids of stop tokens that end a response.")


class RolloutConfig(RemoteEnginesConfig, SamplingConfig):
    """Sampling."""

    batch_size: int = count(1024, "Prompts per iteration.")
    vllm_generate_batch_size: int = unset(
        "Prompts to generate responses for at once; unset: batch_size.",
        ge=1,
    )
    micro_batch_size: int = count(
        1, "Samples per forward pass without gradient.", unless="max_tokens_per_gpu"
    )
    max_tokens_per_gpu: int | None = unset(
        "Maximum tokens per forward pass with dynamic batches; unset: same as in training. A "
        "longer sample gets its own pass.",
        ge=1,
    )
    n_samples_per_prompt: int = count(1, "Responses per prompt.")
    seeded: str = option(
        "auto", "Seed each sample; auto: only on CPUs.", choices=("auto", "on", "off")
    )
    max_turns: int | None = unset("Maximum turns per agent episode.", ge=1)
    step_timeout: float = option(600.0, "Time limit in seconds for one agent step.", gt=0)
    episode_timeout: float = option(3600.0, "Time limit in seconds for an entire episode.", gt=0)
    dump_dir: str | None = unset(
        "Write every episode to this folder, one file per step.",
        holds="place",
        writes="episodes",
    )
    replay_dir: str | None = unset(
        "Train on the episodes in this folder, without engines.", holds="place"
    )
    only: bool = switch("Generate and reward samples without training.")


class RuleConfig(Section):
    """Rewards from a function, server or verifier."""

    remote_url: str | None = unset(
        "Comma-separated HTTP servers, or a .py file with reward_func.",
        holds="place",
    )
    verifier: str | None = unset(
        "Built-in check of a response. Expected labels: for math, the answer; for code, tests as "
        "JSON; for format, a regular expression (default: <think> once, then an answer); for "
        "length, a range of words such as 100-200.",
        choices=("math", "code", "format", "length"),
    )
    batch: bool = switch("Call the function once per group of samples.", needs="remote_url")
    max_error_rate: float = option(
        0.1, "Stop the run if a larger fraction of episodes fails.", ge=0, le=1
    )
    timeout: float = option(
        180.0,
        "Time limit in seconds for one reward call.",
        gt=0,
    )
    retries: int = option(5, "Retries after a failed call to a reward server.", ge=0)
    workers: int = unset(
        "Number of processes that run reward and agent code. Default: the number of CPU cores.",
        ge=1,
    )
    memory_gib: float = option(
        4.0, "Memory limit in GiB for each process that runs reward or agent code.", gt=0
    )

    @property
    def needs_labels(self) -> bool:
        """True if the verifier compares responses with labels."""
        return self.verifier in ("math", "code", "length")

    @property
    def sources(self) -> list[str]:
        """The parts of `remote_url`."""
        return items(self.remote_url)

    @property
    def function_path(self) -> str | None:
        """The .py file with `reward_func`, or None if there is none."""
        return next((part for part in self.sources if part.endswith(".py")), None)

    @property
    def urls(self) -> list[str]:
        """The HTTP reward servers."""
        return [part for part in self.sources if not part.endswith(".py")]


class RewardConfig(RuleConfig):
    """Rewards."""

    model_name_or_path: str | None = unset(
        "Comma-separated reward models; their scores are summed.", holds="model"
    )
    process_model: str | None = unset(
        "Process reward model, which scores the end of each step.", holds="model"
    )
    step_separator: str = option(
        "\n", "Text that ends each step of an answer.", needs="process_model"
    )
    weights: tuple[float, ...] | None = unset(
        "Weights of the rewards in their sum: one per reward model, then the process model, then "
        "the function, server, verifier or agent; unset: 1 each.",
    )
    on_error: str = option(
        "fail",
        "How to treat episodes whose reward failed. fail: count them toward "
        "reward.max_error_rate. drop: leave them out. A number: use it as their reward.",
        metavar="fail|drop|NUMBER",
    )
    normalize_enable: bool = switch(
        "Normalize rewards and values with the stored mean and standard deviation.",
    )
    clip_range: tuple[float, float] = option(
        (-10.0, 10.0), "Clip an episode's shaped reward to this range."
    )
    overlong_buffer_len: float | None = unset(
        "Number of tokens before the length limit over which the overlong penalty grows (DAPO).",
        gt=0,
    )
    overlong_penalty_factor: float = option(
        1.0, "Maximum overlong penalty.", ge=0, needs="overlong_buffer_len"
    )
    stop_properly_penalty_coef: float | None = unset(
        "For truncated responses: a value from 0 to 1 multiplies the reward, a negative value "
        "replaces it.",
        le=1,
    )
    offload: bool = switch("Keep the reward models in CPU memory between uses.")
    num_nodes: int = count(1, "Nodes for the reward models.")
    num_gpus_per_node: int = count(
        8, "GPUs per node; on machines without GPUs, CPU processes per node."
    )

    @property
    def fallback(self) -> float | None:
        """The reward of an episode whose reward failed, if `on_error` is a number."""
        return None if self.on_error in ("fail", "drop") else float(self.on_error)

    @property
    def scalars(self) -> list[str]:
        """The models that score complete answers."""
        return items(self.model_name_or_path)

    @property
    def models(self) -> list[str]:
        """All reward models."""
        return [*self.scalars, *filter(None, [self.process_model])]

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not self.models:
            devices = ["offload", "num_nodes", "num_gpus_per_node"]
            yield Unused(devices, "without --model_name_or_path or --process_model")


class PromptColumns(Section):
    """Columns of prompts."""

    columns: ClassVar = ("input_key", "label_key")  # columns that are read from a row
    input_key: str = option("input", "Column with the prompt, as text or chat.")
    label_key: str | None = unset("Column to pass to the reward function as label.")


class PromptConfig(PromptColumns):
    """Prompts."""

    prompt_dataset: str = required(
        "Prompts: comma-separated files, folders or Hub names.", holds="dataset"
    )
    prompt_probs: str | None = unset(
        "Comma-separated probabilities; unset: use the datasets in order."
    )
    prompt_split: str = option("train", "Split of each dataset; files have a single split.")


class RolePlacement(Section):
    """Ray resources of one role."""

    resources: Mapping[str, Any] = option(
        {},
        "Requirements of each process: Ray resource amounts and node labels.",
        metavar="JSON",
    )


class PlacementConfig(Section):
    """Ray resources per role."""

    cluster: str | None = unset(
        "Plan for this cluster instead of the current one; requires dry_run. If the kind of GPU "
        "is given, as in 2x8xH100-80GB, also plan the GPU memory.",
        metavar="NODESxGPUS",
        saved=False,
    )
    actor: RolePlacement = RolePlacement()
    critic: RolePlacement = RolePlacement()
    ref: RolePlacement = RolePlacement()
    reward: RolePlacement = RolePlacement()
    vllm: RolePlacement = RolePlacement()

    def wants(self, roles: Sequence[str]) -> dict[str, Any]:
        """Return the resources that a process with these roles requests, or none in a declared
        cluster.
        """
        resources: dict[str, Any] = {}
        if self.cluster:
            return resources
        for role in roles:
            section = role.replace("teacher", "ref")
            resources |= value_at(self, section).resources
        return resources

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.cluster:
            roles = ["actor", "critic", "ref", "reward", "vllm"]
            yield Unused(roles, "with --cluster")


def unused_without(alternatives: Mapping[str, object], *names: str) -> Iterator[Unused]:
    """Yield the flags `names`, which require one of the alternatives, if no alternative is set.

    The keys of `alternatives` are phrases for notices.
    """
    if not any(alternatives.values()):
        yield Unused(names, f"without {' or '.join(alternatives)}")


def unused_by_rewards(
    reward: RuleConfig,
    rollout: RemoteEnginesConfig,
    *,
    agents: Mapping[str, object],
    judges: Mapping[str, object],
) -> Iterator[Unused]:
    """Yield the flags for functions and servers that this reward does not use.

    `agents` and `judges` are other users of these flags, in the format of `unused_without`.
    """
    servers = {**judges, "--rollout.remote_engines": rollout.remote_engines}
    rules = {"--reward.remote_url": reward.remote_url, VERIFIER: reward.verifier}
    code = {FUNCTION: reward.function_path, VERIFIER: reward.verifier}
    yield from unused_without({**rules, **servers}, "reward.timeout")
    yield from unused_without({"--reward.remote_url URL": reward.urls, **servers}, "reward.retries")
    yield from unused_without({**code, **agents}, "reward.workers", "reward.memory_gib")


def unused_by_agents(agent: str | None) -> Iterator[Unused]:
    """Yield the flags that episodes with this agent, or without an agent, do not use."""
    if agent:
        yield Unused(["reward.remote_url"], f"with {AGENT}")
    else:
        turns = ["rollout.max_turns", "rollout.step_timeout", "rollout.episode_timeout"]
        yield Unused(turns, f"without {AGENT}")
