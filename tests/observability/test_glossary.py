"""The declarations of metrics and the page made from them."""

import re

import pytest

from openrlhf.observability.glossary import GLOSSARY, declare, find_spec, glossary_markdown
from openrlhf.observability.metrics import Last, Max, Mean

# The names users have dashboards for.
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
def test_every_established_name_is_declared(name):
    assert find_spec(name) is not None


def test_a_pattern_stands_for_any_data_source_and_k():
    spec = find_spec("eval/eval_my_own_set_pass8")
    assert spec is GLOSSARY["eval/eval_{datasource}_pass{k}"]
    assert find_spec("eval/eval_my_own_set_pass") is None


def test_a_number_of_user_code_needs_no_declaration():
    assert find_spec("train/math_accuracy") is None


def test_kinds_say_how_names_reduce():
    assert GLOSSARY["train/kl"].kind is Mean
    assert GLOSSARY["train/logprob_gap_max"].kind is Max
    assert GLOSSARY["train/actor_lr"].kind is Last


def test_declaring_a_name_twice_is_an_error():
    with pytest.raises(ValueError, match="'train/kl' is declared twice"):
        declare(Mean, "", {"train/kl": "again"})


def test_the_page_has_one_row_of_four_cells_for_every_name():
    page = glossary_markdown()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(GLOSSARY)
    assert all(len(re.split(r"(?<!\\)\|", row)) == 4 + 2 for row in rows)
    assert "| `train/kl` | mean | nats per token | KL of the policy to the reference" in page


def test_every_definition_is_one_sentence_on_one_line():
    for name, spec in GLOSSARY.items():
        assert spec.definition.endswith("."), name
        assert "\n" not in spec.definition, name
