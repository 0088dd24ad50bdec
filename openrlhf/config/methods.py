"""Methods that are sets of flags, such as GRPO. docs/algorithms.md cites their papers."""

import re

COMMANDS: dict[str, str] = {
    "grpo": "ppo --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
    "--algo.loss.aggregation sequence --algo.kl.use_loss --algo.kl.estimator k3",
    "dr_grpo": "ppo --algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 8 "
    "--algo.loss.aggregation constant --algo.kl.init_coef 0",
    "dapo": "ppo --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
    "--actor.eps_clip_low_high 0.2 0.28 --algo.kl.init_coef 0 --algo.dynamic_filtering_enable",
    "gspo": "ppo --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
    "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 --algo.kl.init_coef 0",
    "cispo": "ppo --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
    "--actor.policy_loss_type cispo --algo.kl.init_coef 0",
    "rloo": "ppo --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4",
    "reinforce": "ppo --algo.advantage.estimator reinforce",
    "reinforce_baseline": "ppo --algo.advantage.estimator reinforce_baseline "
    "--rollout.n_samples_per_prompt 8",
    "flash_reinforce": "ppo --algo.advantage.estimator flash_reinforce",
    "ipo": "dpo --model.loss_type ipo",
    "simpo": "dpo --model.loss_type simpo",
    "orpo": "dpo --model.loss_type orpo",
}
OTHER_NAMES = {
    "rl": "ppo",
    "gae": "ppo",
    "drgrpo": "dr_grpo",
    "reinforce++": "reinforce",
    "reinforce_plus_plus": "reinforce",
    "reinforce_pp": "reinforce",
    "reinforce++_baseline": "reinforce_baseline",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
}


def command_of_method(name: str) -> str | None:
    """Return the command and flags of a method such as `grpo` or `train_grpo_ray`, or None if the
    name is unknown.
    """
    method = re.sub(r"[-. ]", "_", name.lower()).removeprefix("train_")
    method = method.removesuffix("_ray").removesuffix("_trainer")
    method = OTHER_NAMES.get(method, method)
    if method == "ppo":
        return "ppo"
    return COMMANDS.get(method)
