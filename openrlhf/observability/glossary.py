"""What every logged number means: its name, how it reduces, its unit and one line of definition.

`docs/metrics.md` is generated from here. Names are `stage/quantity`. Numbers that a user's reward
function or agent adds are logged as `train/<name>`, as means, and need no declaration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf.observability.metrics import Last, Max, Mean, Metric


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """The declaration of one metric. `unit` is "" for a plain number; a share lies in [0, 1]."""

    kind: type[Metric]
    unit: str
    definition: str


GLOSSARY: dict[str, MetricSpec] = {}


def declare(kind: type[Metric], unit: str, definitions: Mapping[str, str]) -> None:
    """Add metrics of one kind and unit to `GLOSSARY`. `{…}` in a name stands for any text.

    Raises ValueError for a name that is declared already.
    """
    for name, definition in definitions.items():
        if name in GLOSSARY:
            raise ValueError(f"metric {name!r} is declared twice")
        GLOSSARY[name] = MetricSpec(kind=kind, unit=unit, definition=definition)


def find_spec(name: str) -> MetricSpec | None:
    """The declaration of a logged name, or None for a number that user code added.

    Example: `eval/eval_gsm8k_pass4` finds `eval/eval_{datasource}_pass{k}`.
    """
    if name in GLOSSARY:
        return GLOSSARY[name]
    for pattern, spec in GLOSSARY.items():
        fixed_parts = re.split(r"\{\w+\}", pattern)
        if len(fixed_parts) > 1 and re.fullmatch("(.+)".join(map(re.escape, fixed_parts)), name):
            return spec
    return None


def glossary_markdown() -> str:
    """The documentation page of all metrics: one table per stage, names in alphabetical order."""
    lines = ["# Metrics", "", _INTRODUCTION]
    for stage, title in _STAGES.items():
        lines += ["", f"## {title}", "", "| name | reduces as | unit | meaning |"]
        lines += ["|---|---|---|---|"]
        for name in sorted(name for name in GLOSSARY if name.startswith(f"{stage}/")):
            spec = GLOSSARY[name]
            meaning = spec.definition.replace("|", "\\|")
            lines += [f"| `{name}` | {spec.kind.__name__.lower()} | {spec.unit or '–'} | {meaning} |"]
    return "\n".join(lines) + "\n"


_STAGES = {"train": "Training", "rollout": "Rollout", "timing": "Time and throughput", "eval": "Evaluation"}

_INTRODUCTION = """\
Every number a run logs, under the name it has in `metrics.jsonl` and in the trackers. Means are
weighted by what they count (action tokens, target tokens, episodes or pairs) over all ranks and
micro-batches of a step, so they do not depend on how a batch was split. Numbers added by your
reward function or agent appear as `train/<name>`, as means."""

declare(
    Mean,
    "",
    {
        "train/policy_loss": "Policy loss, aggregated as `--algo.loss.aggregation` says.",
        "train/critic_loss": "Half the clipped squared error of the critic against the returns.",
        "train/loss": "Reward-model loss of the step.",
        "train/loss_mean": "Mean loss over the micro-batches of the step.",
        "train/aux_loss": "Load-balancing loss of a mixture of experts, before its coefficient.",
        "train/critic_aux_loss": "Load-balancing loss of a critic that is a mixture of experts.",
        "train/reward": "Reward of an episode after length and stop penalties.",
        "train/score": "Score of an episode, which dynamic filtering looks at.",
        "train/reward_model_{i}": "Reward of the i-th reward model, where there are several rewards.",
        "train/reward_rule": "Reward of the rule, where there are several rewards.",
        "train/return": "Sum of an episode's token rewards: shaped reward minus KL penalty.",
        "train/values": "Value the critic predicts at an action token.",
        "train/group_reward_std": "Standard deviation of the rewards of a prompt's samples.",
        "train/chosen_reward": "Reward of the chosen answers.",
        "train/reject_reward": "Reward of the rejected answers.",
        "train/rollout_ratio": "π_old ÷ π_rollout of a sampled token: 1 where engine and trainer agree.",
        "rollout/reward_mean": "Reward of the episodes kept for training, before penalties.",
        "eval/eval_loss": "Loss on the evaluation set.",
        "eval/reward_mean": "Reward of all evaluation answers; stored for normalisation.",
        "eval/margin_mean": "Reward of the chosen text of an evaluation pair minus that of the rejected one.",
        "eval/eval_{datasource}_margin_mean": "The same, of one data source.",
        "eval/eval_{datasource}_reward_mean": "Reward of the evaluation samples of one data source.",
        "eval/eval_{datasource}_pass{k}": "Best score of k samples of a prompt; k = 1: mean. A rule's score, else the reward.",
    },
)
declare(
    Mean,
    "nats per token",
    {
        "train/gpt_loss": "Negative log-likelihood of the target tokens.",
        "train/ptx_loss": "Negative log-likelihood of the pretraining tokens mixed into RL.",
        "train/teacher_kl": "log π_old − log π_teacher of a sampled token, held to ±10: what distillation lowers.",
        "train/kl": "KL of the policy to the reference, by the chosen estimator.",
        "train/logprobs_diff": "log π_θ − log π_ref.",
        "train/ppo_kl": "log π_old − log π_θ: how far the updates of a batch moved the policy.",
        "train/update_kl": "The same distance by k3, which is never negative: what `--algo.kl.stop_update` looks at.",
        "train/vllm_kl": "log π_rollout − log π_old: disagreement of engine and trainer, signed.",
        "train/logprob_gap_mean": "|log π_rollout − log π_trainer|: engine against trainer, and with over-sampling the age of the samples too.",
        "train/entropy_loss": "Entropy of the policy at an action token.",
        "eval/eval gpt_loss": "Negative log-likelihood of the evaluation set's target tokens.",
    },
)
declare(Max, "nats per token", {"train/logprob_gap_max": "Largest |log π_rollout − log π_trainer| of any token."})
declare(
    Mean,
    "share",
    {
        "train/ppo_clip_ratio": "Action tokens whose surrogate was clipped.",
        "train/kl_clamped": "Action tokens whose KL estimate hit its bound of ±10.",
        "train/response_clip_ratio": "Episodes as long as `--data.max_len` allows.",
        "train/truncated": "Episodes that ran out of tokens before they ended.",
        "train/dead_groups": "Prompts whose samples all have one reward: nothing to compare.",
        "train/rollout_ratio_outside": "Action tokens whose ratio (at the correction's level) lies outside its band, corrected or not.",
        "train/acc": "Pairs ranked rightly.",
        "train/acc_mean": "`train/acc` over the micro-batches of the step.",
        "rollout/truncated_rate": "Episodes kept for training that ran out of tokens.",
        "timing/prefill_cached": "Prompt tokens of all samples that were in an engine's prefix cache: (n − 1) ÷ n where n samples share a prefill.",
        "timing/tail_share": "Time of generation in which less than a tenth as many samples were running as at the most.",
        "eval/acc_mean": "Evaluation pairs ranked rightly.",
        "eval/eval_{datasource}_acc_mean": "The same, of one data source.",
        "eval/win_rate": "Pairs in which the model's answer is the better one, ties one half: the mean over prompts.",
        "eval/eval_{datasource}_win_rate": "The same, of one data source.",
        "eval/eval_truncated_rate": "Evaluation samples that ran out of tokens.",
        "eval/eval_{datasource}_truncated_rate": "The same, of one data source.",
    },
)
declare(
    Mean,
    "tokens",
    {
        "train/response_length": "Sampled tokens of an episode.",
        "train/total_length": "Length of an episode, prompt and feedback included.",
        "rollout/response_length_mean": "Sampled tokens of an episode kept for training.",
        "eval/eval_response_length_mean": "Length of an evaluation response.",
        "eval/eval_{datasource}_response_length_mean": "The same, of one data source.",
    },
)
declare(Mean, "percent", {"train/dynamic_filtering_pass_rate": "Tried prompts that dynamic filtering kept."})
declare(
    Last,
    "",
    {
        "train/lr": "Learning rate of the step.",
        "train/actor_lr": "Learning rate of the policy's last optimizer step.",
        "train/critic_lr": "Learning rate of the critic's last optimizer step.",
        "train/grad_norm": "Norm of the whole gradient before clipping.",
        "train/actor_grad_norm": "Norm of the policy's whole gradient before clipping.",
        "train/critic_grad_norm": "Norm of the critic's whole gradient before clipping.",
        "train/kl_coef": "Coefficient β of the KL penalty or loss.",
        "rollout/reward_std": "Standard deviation of the rewards of the episodes kept for training.",
        "eval/win_rate_stderr": "Standard error of the win rate, prompts being independent.",
        "eval/eval_{datasource}_win_rate_stderr": "The same, of one data source.",
        "eval/reward_std": "Standard deviation of all evaluation rewards; for normalisation.",
    },
)
declare(
    Last,
    "count",
    {
        "train/actor_steps": "Optimizer steps that the policy took for the batch.",
        "train/critic_steps": "Optimizer steps that the critic took for the batch.",
        "train/nonfinite_steps": "Optimizer steps skipped so far: loss or gradient not finite.",
        "train/failed_episodes": "Episodes of the step that failed and were dropped.",
        "train/failed_{kind}": "Episodes with this kind of error, kept ones too: timeout, exception, exit, memory, killed, result, server, engine.",
        "rollout/num_samples": "Episodes kept for training.",
        "eval/wins": "Pairs in which the model's answer is the better one.",
        "eval/ties": "Pairs in which neither answer is.",
        "eval/losses": "Pairs in which the other answer is the better one.",
        "eval/failed_pairs": "Pairs that could not be judged.",
        "eval/eval_num_samples": "Samples scored in the evaluation.",
        "eval/eval_failed_episodes": "Evaluation samples that failed and have no reward.",
    },
)
declare(
    Last,
    "seconds",
    {
        "timing/generation": "Generating episodes and rewarding them by function, server or verifier.",
        "timing/make_experience": "Forward passes and credit assignment.",
        "timing/old_logprobs": "Within make_experience, until log π_old was there; absent where nothing needs it.",
        "timing/ref_logprobs": "The same for log π_ref.",
        "timing/teacher_logprobs": "The same for the teacher's log-probabilities.",
        "timing/values": "The same for the critic's values.",
        "timing/reward_models": "The same for the rewards of reward models; with dynamic filtering they are part of generation.",
        "timing/ppo_train": "Updating policy and critic.",
        "timing/broadcast": "Publishing the new weights to the engines.",
        "timing/evaluation": "Evaluating.",
        "timing/checkpoint": "Writing a checkpoint after the step before.",
        "timing/step_total": "The whole step, waiting for episodes included.",
    },
)
declare(
    Last,
    "tokens per second",
    {"timing/tokens_per_second": "Tokens of the batch, prompts included, ÷ time of the step."},
)

if __name__ == "__main__":  # writes docs/metrics.md: `make docs`
    print(glossary_markdown(), end="")
