"""Settings of workers, engines and the training loop, derived from the flags."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from openrlhf.checkpoints.manifest import StateLayout
from openrlhf.config.commands import ModelCommand
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.learning import ActorConfig, CriticConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.models.cost import attention_length
from openrlhf.models.loading import LoadSpec, configuration
from openrlhf.rollout.engine_settings import Device, EngineSettings
from openrlhf.rollout.generator import SamplingSpec
from openrlhf.rollout.sampling import SamplingParams
from openrlhf.trainers.checkpointing import CRITIC_PART, POLICY_PART
from openrlhf.trainers.engine_comparison import Probe
from openrlhf.weights.transport import Transport
from openrlhf.workers.base import MicroBatchLimits, RoleSettings
from openrlhf.workers.frozen import RewardModelSettings

# Commands that use engines and reward models.
SamplingCommand = PPOConfig | EvaluationConfig | BatchInferenceConfig
ENGINE_PROBE_TOKENS = 8  # number of tokens per prompt for comparing engines with the trainer
# The largest mean difference between log-probabilities that rounding can explain, in nats.
FP32_TOLERANCE = 0.01
BF16_TOLERANCE = 0.2
# substrings of the configuration keys for dropout and router jitter rates
RANDOM_LAYERS = ("dropout", "pdrop", "jitter")


def needs_old_logprobs(config: PPOConfig) -> bool:
    """Return whether the trainer recomputes log π_old before the update.

    A random forward pass, for example with dropout, would give a different log π_old.
    """
    if config.needs_old_policy or (config.ds.lora.rank and config.ds.lora.dropout):
        return True
    model = load_spec(config, config.actor.model_name_or_path)
    return _has_random_layers(configuration(model).to_dict())


def _has_random_layers(entries: dict[str, Any]) -> bool:
    """Return whether a (possibly nested) configuration has a nonzero dropout or jitter rate."""
    for name, value in entries.items():
        if isinstance(value, dict):
            if _has_random_layers(value):
                return True
        elif isinstance(value, float) and value > 0:
            if any(word in name for word in RANDOM_LAYERS):
                return True
    return False


def optimizer_steps(config: PPOConfig, prompts: int, *, after: int = 0) -> int:
    """Return the number of optimizer steps of a learning-rate schedule.

    Counts the steps after the first `after` batches. The number is exact if no episode fails or is
    filtered out.
    """
    return sum(config.updates_of(drawn) for drawn in config.step_sizes(prompts)[after:])


def load_spec(config: ModelCommand, path: str) -> LoadSpec:
    """Return the settings for loading a model, independent of the working directory."""
    return LoadSpec.of(config, located(path))


def located(path: str) -> str:
    """Return the absolute path of a folder, or the unchanged name of a Hub model."""
    if os.path.exists(path):
        return os.path.abspath(path)
    return path


def trained_settings(config: PPOConfig, path: str, steps: int) -> RoleSettings:
    """Return the worker settings of a policy or critic that trains for `steps` optimizer steps."""
    load = load_spec(config, path).trained(config.actor, config.ds.lora, config.train.seed)
    return RoleSettings(config=config, load=load, total_steps=steps)


def judge_spec(config: SamplingCommand, path: str) -> LoadSpec:
    """Return the settings for loading a reward model."""
    spec = load_spec(config, path)
    if isinstance(config, PPOConfig):  # in RL, --ds.load_in_4bit applies only to trained models
        return replace(spec, ds=replace(spec.ds, load_in_4bit=False))
    return spec


def attention_length_of(worker: RoleSettings | RewardModelSettings) -> int | None:
    """Return the length in tokens at which attention costs as much as the rest of a role's model.

    Returns None if costs are linear in the length. If there are several reward models, the first
    reward model is used.
    """
    if isinstance(worker, RoleSettings):
        load = worker.load
    else:
        load = [*worker.models, worker.process_model][0]
    if load is None:
        return None
    return attention_length(configuration(load))


def reward_settings(config: SamplingCommand) -> RewardModelSettings:
    """Return the settings of the reward workers."""
    process_model = None
    if config.reward.process_model:
        process_model = judge_spec(config, config.reward.process_model)
    return RewardModelSettings(
        models=tuple(judge_spec(config, path) for path in config.reward.scalars),
        process_model=process_model,
        limits=MicroBatchLimits.of_forwards(config.rollout, config.ds),
        head_prefix=config.ds.value_head_prefix,
        reward=config.reward,
    )


def engine_settings(
    config: SamplingCommand, path: str, kind: Device, tokenizer: PreTrainedTokenizerBase
) -> EngineSettings:
    """Return the engine settings for a model."""
    return EngineSettings(
        model=located(path),
        vllm=config.vllm,
        max_model_len=config.data.max_len,
        seed=config.train.seed,
        device=kind,
        seeded=config.rollout.seeded == "on",
        stop_strings=bool(config.rollout.stop or config.train.agent_func_path),
        end_token_ids=(cast(int, tokenizer.eos_token_id),),
        trust_remote_code=config.model.trust_remote_code,
    )


def engine_probe(config: PPOConfig, prompts: Sequence[list[int]]) -> Probe | None:
    """Return the settings for comparing the engines with the trainer before the first step.

    Returns None if the engines quantize the weights.
    """
    if config.vllm.quantization:
        return None
    room = max(1, config.data.max_len - ENGINE_PROBE_TOKENS)
    tolerance = BF16_TOLERANCE
    if config.vllm.dtype == config.ds.param_dtype == "fp32":
        tolerance = FP32_TOLERANCE
    return Probe(
        prompts=[prompt[-room:] for prompt in prompts],
        params=SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=ENGINE_PROBE_TOKENS,
            ignore_eos=True,
            seed=train_sampling(config).seed,
        ),
        tolerance=tolerance,
    )


def transport(config: PPOConfig, kind: Device) -> Transport:
    """Return the transport that sends weights to the engines.

    If an engine and the trainer share a GPU, the weights are passed through the GPU's memory.
    """
    if kind == "cuda" and config.hybrid and config.vllm.sync_backend == "nccl":
        return "ipc"
    return cast(Transport, config.vllm.sync_backend)


def train_sampling(config: SamplingCommand) -> SamplingSpec:
    """Return the sampling settings for training."""
    seed = None
    if config.rollout.seeded == "on":
        seed = config.train.seed
    return SamplingSpec(
        purpose="train", rollout=config.rollout, max_len=config.data.max_len, seed=seed
    )


def eval_sampling(config: PPOConfig | EvaluationConfig) -> SamplingSpec:
    """Return the sampling settings for evaluation, with its own temperature and sample count."""
    rollout = replace(
        config.rollout,
        n_samples_per_prompt=config.eval.n_samples_per_prompt,
        temperature=config.eval.temperature,
    )
    return replace(train_sampling(config), purpose="eval", rollout=rollout)


def inference_sampling(config: BatchInferenceConfig) -> SamplingSpec:
    """Return the sampling settings for batch inference."""
    return replace(
        train_sampling(config),
        purpose="eval",
        rollout=replace(config.rollout, n_samples_per_prompt=config.best_of_n),
        repetition_penalty=config.rollout.repetition_penalty,
    )


def state_layouts(config: PPOConfig) -> dict[str, StateLayout]:
    """Return the state layout of each trained model, keyed by checkpoint part."""
    roles: dict[str, ActorConfig | CriticConfig] = {POLICY_PART: config.actor}
    if config.estimator_traits.needs_critic:
        roles[CRITIC_PART] = config.critic
    layouts: dict[str, StateLayout] = {}
    for part, role in roles.items():
        layouts[part] = StateLayout(
            world_size=role.num_nodes * role.num_gpus_per_node,
            zero_stage=config.ds.zero_stage,
            tensor_parallel_size=config.ds.tensor_parallel_size,
            param_dtype=config.ds.param_dtype,
            optim=role.optim,
        )
    return layouts
