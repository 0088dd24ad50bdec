"""What every logged number means: its name, how it reduces, its unit, its range and one line of definition.

`docs/metrics.md` is generated from here. Names are `stage/quantity`. Numbers that a user's reward
function or agent adds are logged as `train/<name>`, as means, and need no declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from openrlhf.observability.metrics import Deviation, Last, Max, Mean, Metric

ROUNDING = 1e-6  # a value may miss its range by this much
ANY, AT_LEAST_ZERO = (-inf, inf), (0.0, inf)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """The declaration of one metric. `unit` is "" for a plain number; every value lies within `bounds`."""

    kind: type[Metric]
    unit: str
    bounds: tuple[float, float]
    definition: str

    @property
    def range(self) -> str:
        """The range for a reader: "0 to 1", "≥ 0", or "any"."""
        low, high = self.bounds
        return f"{low:g} to {high:g}" if high < inf else f"≥ {low:g}" if low > -inf else "any"


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


def implausible(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each number in the rows of a metrics.jsonl that cannot be right.

    A number cannot be right if it is not finite, lies outside its declared range, or exceeds a number that bounds it.
    """
    found: list[str] = []
    for row in rows:
        for name, value in row.items():
            spec = find_spec(name)
            if spec and value is None:
                found.append(f"step {row['step']}: {name} is not a finite number")
            elif spec and not spec.bounds[0] - ROUNDING <= value <= spec.bounds[1] + ROUNDING:
                found.append(f"step {row['step']}: {name} is {value:g}, and its range is {spec.range}")
        for smaller, larger in _ORDERED:
            low, high = row.get(smaller), row.get(larger)
            if low is not None and high is not None and low > high + ROUNDING:
                found.append(f"step {row['step']}: {smaller} is {low:g}, and {larger} is only {high:g}")
    return found


def glossary_markdown() -> str:
    """The documentation page of all metrics: one table per stage, names in alphabetical order."""
    lines = ["# Metrics", "", _INTRODUCTION]
    for stage, title in _STAGES.items():
        lines += ["", f"## {title}", "", "| name | reduces as | unit | range | meaning |", "|---|---|---|---|---|"]
        for name in sorted(name for name in GLOSSARY if name.startswith(f"{stage}/")):
            spec = GLOSSARY[name]
            cells = f"`{name}`", spec.kind.__name__.lower(), spec.unit or "–", spec.range, spec.definition
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


_ORDERED = (  # the first number of a pair is never more than the second
    ("train/logprob_gap_mean", "train/logprob_gap_max"),
    ("train/response_length", "train/total_length"),
    ("eval/eval_failed_episodes", "eval/eval_num_samples"),
)

_STAGES = {"train": "Training", "rollout": "Rollout", "timing": "Time and throughput", "eval": "Evaluation"}

_INTRODUCTION = """\
Every number that a run logs, under the name it has in `metrics.jsonl` and in the trackers. A mean is weighted by
what it counts (action tokens, target tokens, episodes or pairs) over all ranks and micro-batches of a step, so it does
not depend on how the batch was split. Numbers that your reward function or agent adds appear as `train/<name>`, as
means. A value outside its range is a fault of this program: please report it."""

DECLARED = {  # kind, unit and range of some metrics: their names and definitions
    (Mean, "", ANY): {
        "train/policy_loss": "Policy loss, aggregated as `--algo.loss.aggregation` says.",
        "train/reward": "Reward of an episode after length and stop penalties.",
        "train/score": "Score of an episode, which dynamic filtering looks at.",
        "train/reward_model_{i}": "Reward of the i-th reward model, if there are several rewards.",
        "train/reward_rule": "Reward of the reward function, if there are several rewards.",
        "train/return": "Sum of an episode's token rewards: shaped reward minus KL penalty.",
        "train/values": "Value the critic predicts at an action token.",
        "train/chosen_reward": "Reward of the chosen answers.",
        "train/reject_reward": "Reward of the rejected answers.",
        "rollout/reward_mean": "Reward of the episodes kept for training, before penalties.",
        "eval/reward_mean": "Reward of all evaluation answers; stored for normalisation.",
        "eval/margin_mean": "Reward of the chosen text of an evaluation pair minus that of the rejected one.",
        "eval/eval_{datasource}_margin_mean": "`eval/margin_mean` of one data source.",
        "eval/eval_{datasource}_reward_mean": "Reward of the evaluation samples of one data source.",
        "eval/eval_{datasource}_pass{k}": "Best score of k samples of a prompt, averaged over prompts; k = 1: mean score. The score is the reward function's, else the reward.",
    },
    (Mean, "", AT_LEAST_ZERO): {
        "train/critic_loss": "Half the clipped squared error of the critic against the returns.",
        "train/loss": "Loss of the reward model.",
        "train/loss_mean": "The loss of the step, under an older name.",
        "train/aux_loss": "Load-balancing loss of a mixture of experts, before its coefficient.",
        "train/critic_aux_loss": "Load-balancing loss of a critic that is a mixture of experts.",
        "train/group_reward_std": "Standard deviation of the rewards of a prompt's samples.",
        "train/rollout_ratio": "π_old ÷ π_rollout of a sampled token: 1 if engine and trainer agree.",
        "eval/eval_loss": "Loss on the evaluation set.",
    },
    (Mean, "nats per token", (-10, 10)): {
        "train/teacher_kl": "log π_old − log π_teacher of a sampled token: what distillation lowers.",
        "train/kl": "KL of the policy to the reference, by the chosen estimator.",
    },
    (Mean, "nats per token", ANY): {
        "train/logprobs_diff": "log π_θ − log π_ref.",
        "train/ppo_kl": "log π_old − log π_θ: how far the updates of a batch moved the policy.",
        "train/vllm_kl": "log π_rollout − log π_old: disagreement of engine and trainer, signed.",
    },
    (Mean, "nats per token", AT_LEAST_ZERO): {
        "train/gpt_loss": "Negative log-likelihood of the target tokens.",
        "train/ptx_loss": "Negative log-likelihood of the pretraining tokens mixed into RL.",
        "train/update_kl": "The distance of `train/ppo_kl` by the k3 estimator, which is never negative: what `--algo.kl.stop_update` looks at.",
        "train/logprob_gap_mean": "|log π_rollout − log π_trainer|: engine against trainer; with over-sampling it includes the age of the samples.",
        "train/entropy_loss": "Entropy of the policy at an action token.",
        "eval/eval gpt_loss": "Negative log-likelihood of the evaluation set's target tokens.",
    },
    (Max, "nats per token", AT_LEAST_ZERO): {
        "train/logprob_gap_max": "Largest |log π_rollout − log π_trainer| of any token."
    },
    (Mean, "share", (0, 1)): {
        "train/ppo_clip_ratio": "Action tokens whose surrogate was clipped.",
        "train/kl_clamped": "Action tokens whose KL estimate reached its bound of ±10.",
        "train/response_clip_ratio": "Episodes as long as `--data.max_len` allows.",
        "train/truncated": "Episodes that ran out of tokens before they ended.",
        "train/dead_groups": "Prompts whose samples all have one reward: there is nothing to compare.",
        "train/rollout_ratio_outside": "Action tokens whose ratio (at the correction's level) lies outside its band, corrected or not.",
        "train/acc": "Pairs ranked correctly.",
        "train/acc_mean": "`train/acc` under an older name.",
        "rollout/truncated_rate": "Episodes kept for training that ran out of tokens.",
        "timing/prefill_cached": "Prompt tokens of all samples that were in an engine's prefix cache: (n − 1) ÷ n if n samples share a prefill.",
        "timing/tail_share": "Part of the generation time in which fewer than a tenth of the peak number of samples were running.",
        "eval/acc_mean": "Evaluation pairs ranked correctly.",
        "eval/eval_{datasource}_acc_mean": "`eval/acc_mean` of one data source.",
        "eval/win_rate": "Pairs in which the model's answer is the better one; a tie counts one half. Mean over prompts.",
        "eval/eval_{datasource}_win_rate": "`eval/win_rate` of one data source.",
        "eval/eval_truncated_rate": "Evaluation samples that ran out of tokens.",
        "eval/eval_{datasource}_truncated_rate": "`eval/eval_truncated_rate` of one data source.",
    },
    (Mean, "tokens", AT_LEAST_ZERO): {
        "train/response_length": "Sampled tokens of an episode.",
        "train/total_length": "Length of an episode, prompt and feedback included.",
        "rollout/response_length_mean": "Sampled tokens of an episode kept for training.",
        "eval/eval_response_length_mean": "Sampled tokens of an evaluation response.",
        "eval/eval_{datasource}_response_length_mean": "`eval/eval_response_length_mean` of one data source.",
    },
    (Mean, "percent", (0, 100)): {"train/dynamic_filtering_pass_rate": "Prompts tried that dynamic filtering kept."},
    (Last, "", AT_LEAST_ZERO): {
        "train/lr": "Learning rate of the step.",
        "train/actor_lr": "Learning rate of the policy's last optimizer step.",
        "train/critic_lr": "Learning rate of the critic's last optimizer step.",
        "train/grad_norm": "Norm of the whole gradient before clipping.",
        "train/actor_grad_norm": "Norm of the policy's whole gradient before clipping.",
        "train/critic_grad_norm": "Norm of the critic's whole gradient before clipping.",
        "train/kl_coef": "Coefficient β of the KL penalty or loss.",
        "rollout/reward_std": "Standard deviation of the rewards of the episodes kept for training.",
        "eval/eval_{datasource}_score_stderr": "Standard error of pass@1 of one data source, over prompts.",
        "eval/win_rate_stderr": "Standard error of the win rate, over prompts.",
        "eval/eval_{datasource}_win_rate_stderr": "`eval/win_rate_stderr` of one data source.",
    },
    (Deviation, "", AT_LEAST_ZERO): {
        "eval/reward_std": "Standard deviation of all evaluation rewards; stored for normalisation."
    },
    (Last, "count", AT_LEAST_ZERO): {
        "train/actor_steps": "Optimizer steps that the policy took for the batch.",
        "train/critic_steps": "Optimizer steps that the critic took for the batch.",
        "train/nonfinite_steps": "Optimizer steps skipped so far because the loss or the gradient was not finite.",
        "train/failed_episodes": "Episodes of the step that failed and were dropped.",
        "train/failed_{kind}": "Episodes with an error of this kind, including those that were kept: timeout, exception, exit, memory, killed, result, server, engine.",
        "rollout/num_samples": "Episodes kept for training.",
        "eval/wins": "Pairs in which the model's answer is the better one.",
        "eval/ties": "Pairs in which neither answer is better.",
        "eval/losses": "Pairs in which the other answer is the better one.",
        "eval/failed_pairs": "Pairs that could not be judged.",
        "eval/eval_num_samples": "Samples scored in the evaluation.",
        "eval/eval_failed_episodes": "Evaluation samples that failed and have no reward.",
    },
    (Last, "seconds", AT_LEAST_ZERO): {
        "timing/generation": "Generating episodes and rewarding them by function, server or verifier.",
        "timing/make_experience": "Forward passes and credit assignment.",
        "timing/old_logprobs": "Part of make_experience until log π_old was there; absent if nothing needs it.",
        "timing/ref_logprobs": "Part of make_experience until log π_ref was there.",
        "timing/teacher_logprobs": "Part of make_experience until the teacher's log-probabilities were there.",
        "timing/values": "Part of make_experience until the critic's values were there.",
        "timing/reward_models": "Part of make_experience until the rewards of reward models were there; part of generation with dynamic filtering.",
        "timing/ppo_train": "Updating policy and critic.",
        "timing/broadcast": "Publishing the new weights to the engines.",
        "timing/evaluation": "Evaluating.",
        "timing/checkpoint": "Writing a checkpoint after the previous step.",
        "timing/step_total": "The whole step, waiting for episodes included.",
    },
    (Last, "tokens per second", AT_LEAST_ZERO): {
        "timing/tokens_per_second": "Tokens of the batch, prompts included, ÷ time of the step."
    },
}
GLOSSARY = {
    name: MetricSpec(kind=kind, unit=unit, bounds=bounds, definition=definition)
    for (kind, unit, bounds), metrics in DECLARED.items()
    for name, definition in metrics.items()
}

if __name__ == "__main__":  # writes docs/metrics.md: `make docs`
    print(glossary_markdown(), end="")
