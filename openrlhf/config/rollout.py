"""Sections of RL that say where samples come from: engines, sampling, rewards, placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.config.flags import derived, option


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """Rollout engines (vLLM)."""

    num_engines: int = option(1, help="Engines; at least one.")
    max_engines: int = derived(help="Engines may join up to this number; unset: vllm.num_engines.")
    max_restarts: int = option(3, ge=0, help="Restarts of an engine before the run gives up.")
    tensor_parallel_size: int = option(1, ge=1, help="GPUs that share each layer of an engine.")
    pipeline_parallel_size: int = option(1, ge=1, help="Groups of layers of an engine.")
    dtype: str = option(
        "auto", choices=("auto", "fp32", "bf16"), help="Data type; auto: ds.param_dtype."
    )
    quantization: str | None = option(None, help="vLLM's quantization, such as fp8.")
    gpu_memory_utilization: float = option(
        0.95, gt=0, le=1, help="Share of a GPU's memory an engine may take."
    )
    enforce_eager: bool = option(False, help="No CUDA graphs.")
    enable_prefix_caching: bool = option(
        False,
        help="Reuse the cache of common prefixes; on by itself with several samples or an agent.",
    )
    disable_prefix_caching: bool = option(False, help="Never reuse it.")
    enable_sleep: bool = option(
        False, help="Free the GPU between rollouts, with train.colocate_all."
    )
    sync_backend: str = option("nccl", help="Transport of the weights; gloo where there is no GPU.")
    sync_with_ray: bool = option(False, help="Send weights through Ray's collectives.")
    engine_args: Mapping[str, Any] = option(
        {}, metavar="JSON", help="Further arguments of vLLM's engine, as a JSON object."
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling."""

    batch_size: int = option(1024, ge=1, help="Prompts per iteration.")
    vllm_generate_batch_size: int = derived(
        ge=1, help="Prompts in generation at once; unset: rollout.batch_size."
    )
    micro_batch_size: int = option(1, ge=1, help="Samples per forward pass without gradient.")
    max_tokens_per_gpu: int | None = option(
        None, ge=1, help="Tokens of such a pass with dynamic batches; unset: as in training."
    )
    n_samples_per_prompt: int = option(1, ge=1, help="Responses per prompt.")
    max_new_tokens: int | None = option(
        None, ge=1, help="Tokens of a response; unset: what the prompt leaves of data.max_len."
    )
    temperature: float = option(1.0, ge=0, help="Temperature; log-probabilities are taken at it.")
    top_p: float = option(1.0, gt=0, le=1, help="Sample from the smallest set with this mass.")
    top_k: int = option(-1, ge=-1, help="Sample from so many tokens; -1: all.")
    stop: tuple[str, ...] = option((), help="Texts that end a response.")
    stop_token_ids: tuple[int, ...] = option((), help="Tokens that end a response.")
    seeded: str = option(
        "auto", choices=("auto", "on", "off"), help="A seed per sample; auto: where no GPU is."
    )
    max_turns: int | None = option(None, ge=1, help="Turns of an episode with an agent.")
    step_timeout: float = option(600.0, gt=0, help="Seconds for one step of an agent.")
    episode_timeout: float = option(3600.0, gt=0, help="Seconds for a whole episode.")
    dump_dir: str | None = option(None, help="Write every episode into this folder.")
    replay_dir: str | None = option(None, help="Train from episodes written earlier.")
    only: bool = option(False, help="Generate, and do not train.")
    remote_engines: tuple[str, ...] = option(
        (), metavar="URL", help="OpenAI-compatible servers agents may call by name."
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards."""

    model_name_or_path: str | None = option(
        None, holds="model", help="Reward models, by comma; their scores are added."
    )
    remote_url: str | None = option(
        None, help="HTTP servers, by comma, or a .py file with reward_func."
    )
    verifier: str | None = option(
        None, choices=("math", "code", "format", "length"), help="Built-in verifiable reward."
    )
    process_model: str | None = option(
        None, holds="model", help="Process reward model: its scores become rewards at step ends."
    )
    weights: tuple[float, ...] | None = option(
        None, help="Weights of models and rules in the sum; unset: all 1."
    )
    batch: bool = option(False, help="Call the function once per group of samples.")
    on_error: str = option(
        "fail",
        metavar="fail|drop|NUMBER",
        help="An episode whose reward failed: fail counts it towards reward.max_error_rate, drop "
        "leaves it out, a number becomes its reward.",
    )
    max_error_rate: float = option(
        0.1, ge=0, le=1, help="Share of failed episodes above which the run stops."
    )
    timeout: float = option(180.0, gt=0, help="Seconds for one call.")
    retries: int = option(5, ge=0, help="Further attempts after a failed call.")
    workers: int = derived(ge=1, help="Host processes; unset: the number of cores.")
    memory_gib: float = option(4.0, gt=0, help="GiB of memory of a host process.")
    normalize_enable: bool = option(
        False, help="Normalise by the mean and deviation stored with the model; values too."
    )
    clip_range: tuple[float, float] = option(
        (-10.0, 10.0), help="Bounds of an episode's shaped reward."
    )
    overlong_buffer_len: float | None = option(
        None, gt=0, help="Tokens before the limit in which the length penalty grows (DAPO)."
    )
    overlong_penalty_factor: float = option(1.0, ge=0, help="Largest value of that penalty.")
    stop_properly_penalty_coef: float | None = option(
        None,
        le=1,
        help="Truncated responses: from 0 to 1 multiplies the reward, below 0 replaces it.",
    )
    offload: bool = option(False, help="Keep the models in CPU memory between uses.")
    num_nodes: int = option(1, ge=1, help="Nodes of the reward models.")
    num_gpus_per_node: int = option(8, ge=1, help="GPUs (CPU processes) per node.")

    @property
    def sources(self) -> list[str]:
        """The parts of `remote_url`."""
        return [part.strip() for part in (self.remote_url or "").split(",") if part.strip()]

    @property
    def function_path(self) -> str | None:
        """The .py file with `reward_func`, if that is the reward."""
        return next((part for part in self.sources if part.endswith(".py")), None)

    @property
    def urls(self) -> list[str]:
        """The HTTP reward servers."""
        return [part for part in self.sources if not part.endswith(".py")]


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """Ray resources of one role."""

    resources: Mapping[str, Any] = option(
        {}, metavar="JSON", help="Custom resources or labels of its bundles, as a JSON object."
    )


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Ray resources per role."""

    actor: RolePlacement = RolePlacement()
    critic: RolePlacement = RolePlacement()
    ref: RolePlacement = RolePlacement()
    reward: RolePlacement = RolePlacement()
    vllm: RolePlacement = RolePlacement()
