"""What may be wrong with a configuration of RL; `rules` says what a row of sentences is."""

from pathlib import Path
from typing import Any

from openrlhf.config import choices, machine, rules
from openrlhf.config.effects import Sentences
from openrlhf.config.engine_args import engine_args_mistakes
from openrlhf.config.flags import value_at
from openrlhf.config.learning import RLFlags
from openrlhf.config.rollout import RolloutConfig, VLLMConfig


def correction_preset(config: RLFlags) -> dict[str, Any]:
    """The axes that `is_correction_type` and `is_correction_threshold` stand for, by path."""
    advantage = config.algo.advantage
    level, mode = choices.CORRECTIONS[advantage.is_correction_type]
    axes = {"level": level, "mode": mode, "band": advantage.is_correction_threshold}
    return {f"algo.correction.{name}": value for name, value in axes.items()}


# fmt: off
def algorithm_mistakes(config: RLFlags) -> Sentences:
    """Comparisons have something to compare, ranges go up, parts belong together."""
    algo, alone = config.algo, config.rollout.n_samples_per_prompt < 2
    axes = vars(algo.correction)
    missing = [f"--algo.correction.{name}" for name in axes if axes[name] is None]
    ranges = ("algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold",
              "algo.correction.band", "reward.clip_range")
    return [
        (config.estimator.needs_groups and alone,
         "<algo.advantage.estimator> compares samples of one prompt, but "
         "--rollout.n_samples_per_prompt is 1. Set it to 2 or more, or use reinforce."),
        (algo.dynamic_filtering_enable and alone,
         "--algo.dynamic_filtering_enable judges a prompt by several samples, but "
         "--rollout.n_samples_per_prompt is 1. Set it to 2 or more."),
        *((low >= high, f"--{path} is {low:g} {high:g}: the first must be below the second.")
          for path in ranges for low, high in [value_at(config, path) or (0.0, 1.0)]),
        *rules.balance_reaches_routers("actor", config.actor),
        (0 < len(missing) < len(axes), f"The correction also needs {' and '.join(missing)}."),
        (algo.advantage.is_correction_enable
         and any(value_at(config, path) != value for path, value in correction_preset(config).items()),
         "--algo.advantage.is_correction_enable means the preset <algo.advantage.is_correction_type>, and "
         "--algo.correction.* says something else: give one of the two."),
        (config.actor.policy_loss_type == "cispo" and config.actor.dual_clip,
         "<actor.dual_clip> has no meaning with --actor.policy_loss_type cispo, which bounds every weight: leave it out."),
        (algo.distill.teacher and not algo.distill.coef,
         "<algo.distill.coef> makes --algo.distill.teacher useless: raise it, or leave both out."),
        (config.remote_teacher and config.rollout.temperature != 1,
         "<rollout.temperature> is another than that of the server of <algo.distill.teacher>, which knows log-probabilities "
         "at 1 only: use 1, or a teacher that is loaded here: --algo.distill.teacher PATH."),
        (algo.ptx.dataset and not algo.ptx.coef,
         "<algo.ptx.coef> makes --algo.ptx.dataset useless: raise it, or leave both out."),
        (config.eval.patience and config.eval.dataset and config.eval.steps < 1,
         "<eval.patience> waits for a better evaluation: set --eval.steps."),
        *((value_at(algo.kl, flag) and not algo.kl.init_coef,
           f"<algo.kl.{flag}> is about the KL to the reference, which --algo.kl.init_coef 0 does not load: "
           "start above 0.")
          for flag in ("target", "stop_run")),
    ]


def engine_mistakes(vllm: VLLMConfig, rollout: RolloutConfig, max_len: int) -> Sentences:
    """Engines are there, a prompt has room in them, and their extra arguments leave log-probabilities alone."""
    return [
        *engine_args_mistakes(vllm, rollout, max_len),
        (vllm.max_engines != vllm.num_engines,
         "<vllm.max_engines> is not available yet: use as many as <vllm.num_engines>."),
        (vllm.sync_backend != ("nccl" if machine.count_gpus() else "gloo"),
         "<vllm.sync_backend> is not available yet: leave it out (nccl is used on GPUs, gloo without)."),
        (rollout.max_new_tokens and rollout.max_new_tokens >= max_len,
         "<rollout.max_new_tokens> leaves no room for a prompt in <data.max_len>, which counts "
         "both. Raise data.max_len or lower it."),
    ]


def rollout_mistakes(config: RLFlags) -> Sentences:
    """Engines can work, and a sample has log-probabilities, and is trained on."""
    vllm, rollout, data = config.vllm, config.rollout, config.data
    drawn, batch = rollout.vllm_generate_batch_size, rollout.batch_size
    longest, overlong = rollout.max_new_tokens or data.max_len, config.reward.overlong_buffer_len
    return [
        *engine_mistakes(vllm, rollout, data.max_len),
        *rules.remote_engine_mistakes(rollout),
        (rollout.only and rollout.replay_dir,
         "--rollout.only generates and <rollout.replay_dir> trains from what was generated: give one of them."),
        (rollout.replay_dir and not Path(rollout.replay_dir).expanduser().is_dir(),
         "<rollout.replay_dir> is no folder on this machine: write one with --rollout.dump_dir."),
        (rollout.temperature == 0,
         "<rollout.temperature> is greedy, and log-probabilities at it do not exist. Use a value "
         "above 0; evaluation may be greedy: --eval.temperature 0."),
        (overlong and overlong > longest,
         f"<reward.overlong_buffer_len> is more than the longest response, {longest} tokens "
         "(--rollout.max_new_tokens, else --data.max_len)."),
        (drawn < batch, "<rollout.vllm_generate_batch_size> is less than <rollout.batch_size>: raise it, or leave it out."),
        (drawn > batch and (rollout.dump_dir or rollout.replay_dir),
         "<rollout.vllm_generate_batch_size> generates for several steps at once, and the files of --rollout.dump_dir and "
         "--rollout.replay_dir are of one step each: leave it out."),
    ]


def batch_mistakes(config: RLFlags) -> Sentences:
    """Batch sizes divide each other, and probabilities fit their datasets."""
    train, rollout, dynamic = config.train, config.rollout, config.train.dynamic_batch_enable
    product = f"<rollout.batch_size> x <rollout.n_samples_per_prompt> = {config.samples} samples"
    ranks = max(1, config.actor_ranks)
    prompts = rules.probabilities_fit(config, "data.prompt_dataset", "data.prompt_probs")
    return prompts if rollout.only else [
        *prompts,
        (config.samples % max(1, train.batch_size), f"{product} are no multiple of <train.batch_size>: "
         "change one of them, so that every optimizer step is full."),
        *rules.batch_fits_ranks(
            train.batch_size, ranks, micro=1 if dynamic else train.micro_batch_size,
            what="<actor.num_nodes> x <actor.num_gpus_per_node>"),
        (not dynamic and config.samples < rollout.micro_batch_size * ranks,
         f"{product} are fewer than <rollout.micro_batch_size> for each of {ranks} rank(s)."),
        *rules.probabilities_fit(config, "algo.ptx.dataset", "algo.ptx.probs"),
    ]


def device_mistakes(config: RLFlags) -> Sentences:
    """Roles that share devices have as many."""
    actor, ref, critic, reward = (
        (group.num_nodes, group.num_gpus_per_node) for group in (config.actor, config.ref, config.critic, config.reward)
    )
    train = config.train
    return [
        (train.colocate_actor_ref and config.algo.kl.init_coef > 0 and actor != ref,
         "--train.colocate_actor_ref needs equal sizes, but they are <actor.num_nodes> <actor.num_gpus_per_node> and "
         "<ref.num_nodes> <ref.num_gpus_per_node>."),
        (train.colocate_critic_reward and config.estimator.needs_critic and critic != reward,
         "--train.colocate_critic_reward needs equal sizes, but they are <critic.num_nodes> <critic.num_gpus_per_node> "
         "and <reward.num_nodes> <reward.num_gpus_per_node>."),
    ]


RULES = (algorithm_mistakes, rollout_mistakes, batch_mistakes, device_mistakes)
