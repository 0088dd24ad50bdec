"""Notices about a configuration of RL, by topic."""

from collections.abc import Iterator

from openrlhf.config import choices, sampling_rules
from openrlhf.config.learning import RLFlags
from openrlhf.config.rules import single_process_notices

LARGE_CLIP_OF_SEQUENCES = 0.01  # ratios of sequences move little


def notices(config: RLFlags) -> Iterator[str]:
    """Yield all notices about a configuration of RL."""
    yield from step_notices(config)
    yield from loss_notices(config)
    yield from kl_notices(config)
    yield from reward_notices(config)
    yield from engine_notices(config)
    yield from staleness_notices(config)


def step_notices(config: RLFlags) -> Iterator[str]:
    """Yield where processes run, how samples become optimizer steps, and what a run leaves out."""
    train, rollout, evaluation = config.train, config.rollout, config.eval
    yield from single_process_notices(config)
    if rollout.only:
        yield "--rollout.only does not train, evaluate or save a model."
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
        yield (
            "A replay starts no engines, calls no reward function or agent, and does not evaluate."
        )
    if evaluation.dataset and evaluation.steps in (-1, 0) and not evaluation.at_start:
        yield "--eval.dataset is never used: set --eval.steps or --eval.at_start."
    if train.dynamic_batch_enable and not config.given.get("ds.packing_samples"):
        yield "--train.dynamic_batch_enable turns --ds.packing_samples on."


def loss_notices(config: RLFlags) -> Iterator[str]:
    """Yield what is unusual about the clip range."""
    actor, clip = config.actor, config.actor.eps_clip_low_high
    both = {"actor.eps_clip", "actor.eps_clip_low_high"} <= config.given.keys()
    if both and clip != (actor.eps_clip, actor.eps_clip):
        yield "--actor.eps_clip has no effect beside --actor.eps_clip_low_high."
    if actor.policy_loss_type == "gspo" and max(clip) > LARGE_CLIP_OF_SEQUENCES:
        yield "With gspo <actor.eps_clip_low_high> hardly ever binds: its paper uses 3e-4 4e-4."


def kl_notices(config: RLFlags) -> Iterator[str]:
    """Yield what is unusual about the KL to the reference."""
    kl, train = config.algo.kl, config.train
    place = "reward"
    if kl.use_loss:
        place = "loss"
    fitting = [name for name, traits in choices.KL_ESTIMATORS.items() if place in traits.terms]
    if kl.init_coef and kl.estimator not in fitting:
        if kl.use_loss:
            yield (
                "<algo.kl.estimator> as a loss has an expected gradient of zero: with "
                f"--algo.kl.use_loss use {' or '.join(fitting)}."
            )
        else:
            yield (
                "<algo.kl.estimator> is meant for --algo.kl.use_loss: in the rewards use "
                f"{' or '.join(fitting)}."
            )
    if kl.stop_update and config.samples * train.max_epochs <= train.batch_size:
        yield (
            "--algo.kl.stop_update has no effect: each batch is trained on in one optimizer step, "
            "so there are no later steps to skip."
        )


def reward_notices(config: RLFlags) -> Iterator[str]:
    """Yield what is unusual about rewards."""
    rewarded = sampling_rules.is_rewarded(config.reward, config.train.agent_func_path)
    if config.algo.distill.teacher and config.estimator.needs_critic and not rewarded:
        yield (
            "Only --algo.distill.teacher teaches, and there are no rewards that a critic could "
            "predict: use --algo.advantage.estimator reinforce."
        )
    if config.reward.function_path and not config.data.label_key:
        yield ("--data.label_key is not given: the labels that the reward function gets are empty.")


def engine_notices(config: RLFlags) -> Iterator[str]:
    """Yield what is unusual about engines and sampling."""
    vllm, rollout = config.vllm, config.rollout
    if config.given.get("vllm.enable_prefix_caching") and vllm.disable_prefix_caching:
        yield "--vllm.disable_prefix_caching wins over --vllm.enable_prefix_caching."
    cuts = rollout.top_p != 1 or rollout.top_k not in (-1, 0)
    if cuts and not rollout.only:
        yield (
            "<rollout.top_p> and <rollout.top_k>: the engine's log-probabilities are of the cut "
            "distribution, the trainer's of the whole one, so the importance weights of a "
            "correction and the mismatch metrics are biased."
        )
    if vllm.hang_timeout < config.train.publish_timeout:
        yield (
            "<vllm.hang_timeout> is less than <train.publish_timeout>: an engine that takes a "
            "longer publication is restarted, because it does not answer during that time."
        )
    if vllm.quantization and not config.algo.correction.level:
        yield (
            "With <vllm.quantization> samples come from rounded weights, which differ from the "
            "policy's: --algo.advantage.is_correction_enable corrects the loss for that."
        )


def staleness_notices(config: RLFlags) -> Iterator[str]:
    """Yield how old the weights of samples may be, and whether the loss is corrected for that."""
    train, rollout, level = config.train, config.rollout, config.algo.correction.level
    at_once = rollout.vllm_generate_batch_size
    ahead = at_once > rollout.batch_size and not train.async_enable
    if ahead and not rollout.only:
        sentence = (
            f"--rollout.vllm_generate_batch_size {at_once} generates for more than one step: the "
            "later steps train on samples of older weights."
        )
        if not (level or config.algo.advantage.is_correction_enable):
            sentence += (
                " Without --algo.advantage.is_correction_enable the loss is not corrected for that."
            )
        yield sentence
    if not train.async_enable:
        return
    if train.max_staleness < train.async_queue_size:
        yield "With <train.max_staleness> the queue of <train.async_queue_size> can never fill."
    if not level:
        yield (
            "--train.async_enable trains on samples of weights that are up to "
            "<train.max_staleness> versions old, and the loss is not corrected for that: set "
            "--algo.advantage.is_correction_enable."
        )
