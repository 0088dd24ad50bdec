"""From the flags to the settings of workers, engines, experience maker and loop."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from openrlhf.checkpoints.manifest import EngineLayout
from openrlhf.config.commands import ModelCommand
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.inference import BatchInferenceConfig, EngineCommand
from openrlhf.config.ppo import PPOConfig
from openrlhf.models.loading import LoadSpec, configuration
from openrlhf.rollout.engine_settings import Device, EngineSettings
from openrlhf.rollout.generator import SamplingSpec
from openrlhf.rollout.sampling import SamplingParams
from openrlhf.trainers.publisher import Probe
from openrlhf.weights.transport import Transport
from openrlhf.workers.base import MicroBatchLimits, RoleSettings
from openrlhf.workers.frozen import RewardModelSettings

Sampling = (
    PPOConfig | EvaluationConfig | BatchInferenceConfig
)  # commands with engines and reward models
Engines = PPOConfig | EngineCommand
PROBED_TOKENS = 8  # that engines sample per prompt, to be compared with the trainer
ROUNDING = {
    "fp32": 0.01,
    "bf16": 0.2,
}  # mean difference of log-probabilities that rounding may explain, nats


def needs_old_logprobs(config: PPOConfig) -> bool:
    """Whether π_old is recomputed: not if the update is strictly on-policy and nothing else reads
    π_old.

    With one optimizer step and one epoch per batch, no KL in the reward, no correction, no teacher
    and no dropout, the ratio is 1 by construction.
    """
    one_step = config.train.max_epochs == 1 and config.train.batch_size >= config.samples
    compared = (
        config.algo.kl.in_reward or config.algo.correction.level or config.algo.distill.teacher
    )
    return not one_step or bool(compared) or has_dropout(config)


def has_dropout(config: PPOConfig) -> bool:
    """Whether the model's forward draws random numbers in training."""
    if config.ds.lora.rank and config.ds.lora.dropout:
        return True
    return _draws(configuration(load_spec(config, config.actor.model_name_or_path)).to_dict())


def _draws(entries: dict[str, Any]) -> bool:
    """Whether an entry of a configuration, or of a nested one, is a dropout or jitter rate above 0."""
    return any(
        _draws(value)
        if isinstance(value, dict)
        else isinstance(value, float)
        and value > 0
        and any(word in name for word in ("dropout", "pdrop", "jitter"))
        for name, value in entries.items()
    )


def optimizer_steps(config: PPOConfig, prompts: int, *, after: int = 0) -> int:
    """Length of a learning-rate schedule: the optimizer steps after the first `after` batches.

    The number is exact if no episode fails or is filtered.
    """
    return sum(config.updates_of(drawn) for drawn in config.step_sizes(prompts)[after:])


def load_spec(config: ModelCommand, path: str) -> LoadSpec:
    """The settings for loading a model in a process that may have another working directory."""
    return LoadSpec.of(config, located(path))


def located(path: str) -> str:
    """The absolute path of a folder, valid in every working directory; a hub name unchanged."""
    return os.path.abspath(path) if os.path.exists(path) else path


def trained_settings(config: PPOConfig, path: str, steps: int) -> RoleSettings:
    """The settings of the workers of the policy or of the critic, which take so many optimizer
    steps.
    """
    load = load_spec(config, path).trained(config.actor, config.ds.lora, config.train.seed)
    return RoleSettings(config=config, load=load, total_steps=steps)


def judge_spec(config: Sampling, path: str) -> LoadSpec:
    """The settings for loading a reward model. In RL --ds.load_in_4bit is for the models that are
    trained.
    """
    spec = load_spec(config, path)
    return (
        replace(spec, ds=replace(spec.ds, load_in_4bit=False))
        if isinstance(config, PPOConfig)
        else spec
    )


def reward_settings(config: Sampling) -> RewardModelSettings:
    """The settings of the reward workers."""
    return RewardModelSettings(
        models=tuple(judge_spec(config, path) for path in config.reward.scalars),
        process_model=judge_spec(config, config.reward.process_model)
        if config.reward.process_model
        else None,
        limits=MicroBatchLimits.of_forwards(config.rollout, config.ds),
        head_prefix=config.ds.value_head_prefix,
        reward=config.reward,
    )


def engine_settings(
    config: Engines, path: str, kind: Device, tokenizer: PreTrainedTokenizerBase
) -> EngineSettings:
    """The settings of the engines of a model."""
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
    """The comparison of engines and trainer before the first step; None if the engines quantize the
    weights.
    """
    if config.vllm.quantization:
        return None
    room = max(1, config.data.max_len - PROBED_TOKENS)
    temperature, seed = config.rollout.temperature, train_sampling(config).seed
    return Probe(
        prompts=[prompt[-room:] for prompt in prompts],
        params=SamplingParams(
            temperature=temperature, max_tokens=PROBED_TOKENS, ignore_eos=True, seed=seed
        ),
        tolerance=ROUNDING[
            "fp32" if config.vllm.dtype == config.ds.param_dtype == "fp32" else "bf16"
        ],
    )


def transport(config: PPOConfig, kind: Device) -> Transport:
    """How weights reach the engines: through the memory of a GPU where engine and trainer share
    one.
    """
    if kind == "cuda" and config.hybrid and config.vllm.sync_backend == "nccl":
        return "ipc"
    return cast(Transport, config.vllm.sync_backend)


def train_sampling(config: Engines) -> SamplingSpec:
    """How training samples are drawn."""
    seed = config.train.seed if config.rollout.seeded == "on" else None
    return SamplingSpec(
        purpose="train", rollout=config.rollout, max_len=config.data.max_len, seed=seed
    )


def eval_sampling(config: PPOConfig | EvaluationConfig) -> SamplingSpec:
    """How evaluation samples are drawn: as in training, except for temperature and number."""
    eval_ = config.eval
    rollout = replace(
        config.rollout,
        n_samples_per_prompt=eval_.n_samples_per_prompt,
        temperature=eval_.temperature,
    )
    return replace(train_sampling(config), purpose="eval", rollout=rollout)


def inference_sampling(config: BatchInferenceConfig) -> SamplingSpec:
    """How answers are drawn that nobody trains on or evaluates."""
    rollout = replace(config.rollout, n_samples_per_prompt=config.best_of_n)
    penalty = config.rollout.repetition_penalty
    return replace(
        train_sampling(config), purpose="eval", rollout=rollout, repetition_penalty=penalty
    )


def engine_layouts(config: PPOConfig) -> dict[str, EngineLayout]:
    """The layout of the files of each trained model's state."""
    roles = {"_actor": config.actor} | (
        {"_critic": config.critic} if config.estimator.needs_critic else {}
    )
    return {
        part: EngineLayout(
            world_size=role.num_nodes * role.num_gpus_per_node,
            zero_stage=config.ds.zero_stage,
            param_dtype=config.ds.param_dtype,
        )
        for part, role in roles.items()
    }
