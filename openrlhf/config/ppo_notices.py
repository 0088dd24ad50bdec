"""Notices about an RL configuration, by topic."""

from collections.abc import Iterator

from openrlhf.config import choices, sampling_rules
from openrlhf.config.learning import RLFlags
from openrlhf.config.rules import single_process_notices
from openrlhf.config.training_rules import muon_notices

LARGE_CLIP_OF_SEQUENCES = 0.01  # sequence-level ratios stay close to 1


def notices(config: RLFlags) -> Iterator[str]:
    """Yield all notices about an RL configuration."""
    for topic in (
        step_notices,
        optimizer_notices,
        loss_notices,
        kl_notices,
        reward_notices,
        engine_notices,
        staleness_notices,
    ):
        yield from topic(config)


def step_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about processes, optimizer steps, and what the run skips."""
    train, rollout, evaluation = config.train, config.rollout, config.eval
    yield from single_process_notices(config)
    asked = config.given.get("rollout.batch_size", rollout.batch_size)
    if asked != rollout.batch_size:
        samples = asked * rollout.n_samples_per_prompt
        yield (
            f"--rollout.batch_size {asked} gives {samples} samples, fewer than the "
            f"{train.batch_size} of an optimizer step (--train.batch_size), so each iteration "
            f"generates {rollout.batch_size} prompts and takes one full step. To step after every "
            f"{asked} prompts, set --train.batch_size {samples}."
        )
    if rollout.only:
        yield "With --rollout.only, the run does not train, evaluate or save a model."
    else:
        steps = config.samples // max(1, train.batch_size) * train.max_epochs
        micro = str(train.micro_batch_size)
        if train.dynamic_batch_enable:
            micro = f"{train.max_tokens_per_gpu} tokens"
        yield (
            f"Each iteration: {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} = "
            f"{config.samples} samples, {steps} optimizer step(s) of {train.batch_size} on "
            f"{config.data_slices} rank(s), micro-batches of {micro}."
        )
    if rollout.replay_dir:
        yield ("A replay does not start engines, call reward functions or agents, or evaluate.")
    if evaluation.dataset and evaluation.steps in (-1, 0) and not evaluation.at_start:
        yield "--eval.dataset is never used: set --eval.steps or --eval.at_start."
    if train.dynamic_batch_enable and not config.given.get("ds.packing_samples"):
        yield "--train.dynamic_batch_enable turns on --ds.packing_samples."


def optimizer_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about Muon's learning rates."""
    if config.rollout.only:
        return
    yield from muon_notices(config.actor, config.given, "actor.")
    if config.estimator_traits.needs_critic:
        yield from muon_notices(config.critic, config.given, "critic.")


def loss_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about unusual clip ranges and corrections."""
    actor = config.actor
    clip = config.actor.eps_clip_low_high
    both = {"actor.eps_clip", "actor.eps_clip_low_high"} <= config.given.keys()
    if both and clip != (actor.eps_clip, actor.eps_clip):
        yield "--actor.eps_clip has no effect with --actor.eps_clip_low_high."
    if actor.policy_loss_type == "gspo" and max(clip) > LARGE_CLIP_OF_SEQUENCES:
        yield (
            "With gspo, <actor.eps_clip_low_high> almost never clips: the GSPO paper uses 3e-4 "
            "4e-4."
        )
    advantage = config.algo.advantage
    clips_mean = advantage.is_correction_level == "seq" and advantage.is_correction_mode == "clip"
    if clips_mean and not config.policy_loss_traits.rollout_ratio:
        yield (
            "<algo.advantage.is_correction_mode> with <algo.advantage.is_correction_level> weights "
            "every token of an answer by the geometric mean of its ratios, which is not an "
            "importance ratio. OpenRLHF rejects this combination; "
            "--algo.advantage.is_correction_mode mask drops answers instead."
        )


def kl_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about unusual KL settings."""
    kl = config.algo.kl
    train = config.train
    term = "reward"
    if kl.use_loss:
        term = "loss"
    fitting = [name for name, traits in choices.KL_ESTIMATORS.items() if term in traits.terms]
    is_unbiased = kl.use_loss and kl.unbiased_gradient
    if kl.init_coef and kl.estimator not in fitting and not is_unbiased:
        if kl.use_loss:
            yield (
                "<algo.kl.estimator> has a zero expected gradient as a loss: with "
                f"--algo.kl.use_loss, use {' or '.join(fitting)}, or add "
                "--algo.kl.unbiased_gradient."
            )
        else:
            yield (
                "<algo.kl.estimator> is meant for --algo.kl.use_loss: in the rewards, use "
                f"{' or '.join(fitting)}."
            )
    if kl.stop_update and config.samples * train.max_epochs <= train.batch_size:
        yield (
            "--algo.kl.stop_update has no effect: each batch is used for a single optimizer step, "
            "so there are no later steps to skip."
        )


def reward_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about unusual reward settings."""
    rewarded = sampling_rules.is_rewarded(config.reward, config.train.agent_func_path)
    if config.algo.distill.teacher and config.estimator_traits.needs_critic and not rewarded:
        yield (
            "--algo.distill.teacher is the only training signal, so the critic has no rewards to "
            "predict: use --algo.advantage.estimator reinforce."
        )
    if config.reward.function_path and not config.data.label_key:
        yield ("--data.label_key is not set: the reward function receives empty labels.")


def engine_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about unusual engine and sampling settings."""
    vllm = config.vllm
    rollout = config.rollout
    cuts = rollout.top_p != 1 or rollout.top_k not in (-1, 0)
    if cuts and not rollout.only:
        yield (
            "<rollout.top_p> and <rollout.top_k>: the engine's log-probabilities come from the "
            "truncated distribution and the trainer's from the full one, so importance weights "
            "and mismatch metrics are biased."
        )
    if vllm.hang_timeout < config.train.publish_timeout:
        yield (
            "<vllm.hang_timeout> is less than <train.publish_timeout>: engines do not respond "
            "while they receive weights, so a slow publication would restart them."
        )
    if vllm.quantization and not config.algo.advantage.corrects:
        yield (
            "With <vllm.quantization>, samples come from quantized weights, which differ from the "
            "policy's: --algo.advantage.is_correction_level corrects the loss for this difference."
        )


def staleness_notices(config: RLFlags) -> Iterator[str]:
    """Yield notices about sample staleness and whether the loss is corrected for it."""
    train = config.train
    rollout = config.rollout
    several = rollout.vllm_generate_batch_size > rollout.batch_size
    ahead = several and not train.async_enable
    if ahead and not rollout.only:
        yield (
            "<rollout.vllm_generate_batch_size> generates for more than one step at a time: later "
            "steps train on samples from older weights."
        )
    if train.async_enable and train.max_staleness < train.async_queue_size:
        yield "With <train.max_staleness>, the queue (<train.async_queue_size>) can never fill up."
    if (ahead or train.async_enable) and not (config.algo.advantage.corrects or rollout.only):
        yield (
            "Samples may come from older weights (in asynchronous runs, <train.max_staleness>), "
            "and the loss is not corrected for the difference: set "
            "--algo.advantage.is_correction_level."
        )
