"""Methods that users know by name and that are sets of flags here. docs/algorithms.md lists them
with their papers.
"""

import re

GROUPS = "--rollout.n_samples_per_prompt 8"
NO_KL = "--algo.kl.init_coef 0"
GROUP_NORM = f"--algo.advantage.estimator group_norm {GROUPS}"
REINFORCE_BASELINE = f"ppo --algo.advantage.estimator reinforce_baseline {GROUPS}"

COMMANDS: dict[str, str] = {
    "grpo": f"ppo {GROUP_NORM} --algo.loss.aggregation sequence --algo.kl.use_loss --algo.kl.estimator k3",
    "dr_grpo": f"ppo --algo.advantage.estimator dr_grpo {GROUPS} --algo.loss.aggregation constant {NO_KL}",
    "dapo": f"ppo {GROUP_NORM} --actor.eps_clip_low_high 0.2 0.28 {NO_KL} --algo.dynamic_filtering_enable",
    "gspo": f"ppo {GROUP_NORM} --actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 {NO_KL}",
    "cispo": f"ppo {GROUP_NORM} --actor.policy_loss_type cispo {NO_KL}",
    "rloo": "ppo --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4",
    "reinforce": "ppo --algo.advantage.estimator reinforce",
    "reinforce_baseline": REINFORCE_BASELINE,
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
    """Return the command and the flags of a method, such as of `grpo` or `train_grpo_ray`; None for
    other names.
    """
    method = (
        re.sub(r"[-. ]", "_", name.lower())
        .removeprefix("train_")
        .removesuffix("_ray")
        .removesuffix("_trainer")
    )
    method = OTHER_NAMES.get(method, method)
    return "ppo" if method == "ppo" else COMMANDS.get(method)
