"""Metric declarations, and the page generated from the declarations."""

import re

import pytest

from openrlhf.config.flags import toml_beside
from openrlhf.observability import glossary, metrics
from openrlhf.observability.glossary import GLOSSARY, find_spec
from tests.pages import metrics_page
from tests.plausible import implausible, range_of

# Metric names that users' dashboards rely on.
ESTABLISHED = """
train/policy_loss train/actor_lr train/actor_grad_norm train/ppo_clip_ratio train/ppo_kl
train/vllm_kl train/kl train/logprobs_diff train/entropy_loss train/reward train/score train/return
train/group_reward_std train/response_clip_ratio train/response_length train/total_length
train/truncated train/critic_loss train/values train/critic_lr train/critic_grad_norm
train/dynamic_filtering_pass_rate timing/generation timing/make_experience timing/ppo_train
timing/broadcast timing/step_total rollout/reward_mean rollout/reward_std
rollout/response_length_mean rollout/truncated_rate rollout/num_samples
eval/eval_gsm8k_pass1 eval/eval_gsm8k_pass16 eval/eval_gsm8k_response_length_mean
eval/eval_gsm8k_truncated_rate eval/eval_response_length_mean eval/eval_truncated_rate
eval/eval_num_samples
train/gpt_loss train/lr train/grad_norm train/aux_loss train/loss_mean train/loss train/acc
train/acc_mean train/chosen_reward train/reject_reward eval/eval_loss eval/acc_mean
eval/reward_mean eval/reward_std train/ptx_loss
"""


@pytest.mark.parametrize("name", [*ESTABLISHED.split(), "eval/eval gpt_loss"])
def test_names_used_in_dashboards_are_declared(name):
    assert find_spec(name) is not None


def test_find_spec_matches_any_data_source_and_k():
    spec = find_spec("eval/eval_my_own_set_pass8")
    assert spec is GLOSSARY["eval/eval_{datasource}_pass{k}"]
    assert find_spec("eval/eval_my_own_set_pass") is None


def test_find_spec_returns_none_for_metric_added_by_user_code():
    assert find_spec("train/math_accuracy") is None


def test_every_glossary_reduction_exists_and_is_used():
    ways = {spec.reduces for spec in GLOSSARY.values()}
    assert ways == {
        kind.__name__.lower()
        for kind in (metrics.Mean, metrics.Max, metrics.Last, metrics.Deviation)
    }
    assert GLOSSARY["train/kl"].reduces == "mean"
    assert GLOSSARY["train/logprob_gap_max"].reduces == "max"
    assert GLOSSARY["train/actor_lr"].reduces == "last"


def test_no_metric_is_declared_twice():
    groups = toml_beside(glossary.__file__)
    assert sum(len(metrics) for metrics in groups.values()) == len(GLOSSARY)


def test_metrics_page_has_one_row_of_five_cells_per_metric():
    page = metrics_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(GLOSSARY)
    assert all(len(re.split(r"(?<!\\)\|", row)) == 5 + 2 for row in rows)
    assert (
        "| `train/kl` | mean | nats per token | -10 to 10 | KL divergence from the policy to the "
        "reference" in page
    )


def test_every_definition_is_one_line_ending_with_a_period():
    for name, spec in GLOSSARY.items():
        assert spec.definition.endswith("."), name
        assert "\n" not in spec.definition, name


# ---- plausible numbers


def test_implausible_accepts_plausible_numbers():
    step = {
        "train/acc": 1.0,
        "train/lr": 0.0,
        "train/policy_loss": -3.0,
        "train/truncated": 1 + 1e-9,
        "train/mine": -9,
    }
    assert implausible([{"step": 1, "time": 1.7e9, **step}]) == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("train/acc", 1.01, "train/acc is 1.01, and its range is 0 to 1"),
        ("train/dynamic_filtering_pass_rate", 101, "is 101, and its range is 0 to 100"),
        ("train/response_length", -1, "train/response_length is -1, and its range is ≥ 0"),
        ("train/logprob_gap_mean", -0.1, "train/logprob_gap_mean is -0.1, and its range is ≥ 0"),
        ("train/kl", 11, "train/kl is 11, and its range is -10 to 10"),
        ("train/policy_loss", None, "train/policy_loss is not a finite number"),
        (
            "eval/eval_gsm8k_truncated_rate",
            -0.5,
            "eval/eval_gsm8k_truncated_rate is -0.5, and its range is 0 to 1",
        ),
    ],
)
def test_implausible_reports_out_of_range_number_with_its_step(name, value, sentence):
    (found,) = implausible([{"step": 6, "train/lr": 0.1}, {"step": 7, name: value}])
    assert found.startswith("step 7: ") and found.endswith(sentence)


def test_mean_above_its_maximum_is_reported_as_implausible():
    row = {"step": 2, "train/logprob_gap_mean": 0.5, "train/logprob_gap_max": 0.25}
    assert implausible([row]) == [
        "step 2: train/logprob_gap_mean is 0.5, and train/logprob_gap_max is only 0.25"
    ]


def test_only_metrics_that_can_be_negative_have_no_lower_bound():
    signed = {name for name, spec in GLOSSARY.items() if range_of(spec) == "any"}
    names = "reward|return|values|score|pass|margin|policy_loss|diff|ppo_kl|vllm_kl|logratio"
    of_any_task = {
        "train/loss",
        "train/loss_mean",
        "eval/eval_loss",
    }  # the robust DPO loss is allowed to be negative
    assert of_any_task == {name for name in signed if not re.search(names, name)}
    assert {range_of(spec) for spec in GLOSSARY.values()} == {
        "any",
        "≥ 0",
        "0 to 1",
        "0 to 100",
        "-10 to 10",
    }
