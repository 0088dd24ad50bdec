"""Tests for the estimated duration of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from openrlhf.planning.cluster import parse_cluster
from openrlhf.planning.offline_roles import offline_roles
from openrlhf.planning.roles import EngineRole, ModelRole
from openrlhf.planning.shapes import shape_from_config
from openrlhf.planning.speed import (
    generation_seconds,
    layer_operations,
    scoring_seconds,
    training_time,
)
from openrlhf.planning.step_time import step_lines
from tests.planning.conftest import Configure
from tests.planning.models import MODELS

CLUSTER = "8xA100-80GB"
SFT_FLAGS = "--model.model_name_or_path {llama2-7b}"
ROWS = 128  # the default batch size of the offline commands
DPO = "dpo --model.model_name_or_path {llama2-7b} --ds.zero_stage 3"


def seconds(configure: Configure, line: str) -> dict[str, float]:
    """Return the estimated seconds for each phase of a command's step, and for the entire step."""
    found: dict[str, float] = {}
    for text in step_lines(configure(line, CLUSTER), parse_cluster(CLUSTER)):
        name, _, rest = text.strip().partition(": ")
        found[name] = float(rest.rpartition(" x ")[2].split()[0])
    return found


def test_dpo_step_includes_the_reference_forward_pass(configure: Configure) -> None:
    """The reference's forward pass takes a third of the policy's forward and backward passes."""
    for flags in ("", "--ds.lora.rank 8"):
        found = seconds(configure, f"{DPO} {flags}")
        passes = 2 if flags else 3
        assert found["score"] == pytest.approx(found["train policy"] / passes, abs=0.3)
        total = found["score"] + found["train policy"]
        assert found["Estimated step"] == pytest.approx(total, abs=0.15)


def test_precomputed_reference_takes_no_time_in_a_step(configure: Configure) -> None:
    assert "score" not in seconds(configure, f"{DPO} --ref.precompute")


def test_adapters_need_two_thirds_of_the_computation(configure: Configure) -> None:
    compute: list[float] = []
    for flags in ("", "--ds.lora.rank 8"):
        config = configure(f"sft --model.model_name_or_path {{llama2-7b}} {flags}", CLUSTER)
        [role] = offline_roles(config, 8, True)
        time = training_time(role, parse_cluster(CLUSTER), tokens=8192, length=2048)
        compute.append(time.compute)
    assert compute[1] / compute[0] == pytest.approx(2 / 3, rel=0.01)


def role_of(configure: Configure, line: str) -> ModelRole:
    [role, *_] = offline_roles(configure(line, CLUSTER), 8, True)
    return role


def test_second_copy_of_the_weights_is_gathered_within_a_machine(configure: Configure) -> None:
    """The network then carries two of three parts of the communication."""
    line = f"sft {SFT_FLAGS} --ds.zero_stage 3"
    [role, *_] = offline_roles(configure(line, "2x8xH100-80GB"), 16, True)
    cluster = parse_cluster("2x8xH100-80GB")
    plain = training_time(role, cluster, tokens=2048, length=2048)
    copied = training_time(replace(role, zpg=8), cluster, tokens=2048, length=2048)
    assert copied.sent_bytes == plain.sent_bytes
    slow, fast = 8 * 25, 450  # GB/s between and within machines
    assert copied.communication / plain.communication == pytest.approx((2 + slow / fast) / 3)


def test_kto_scores_both_texts_with_the_reference_and_one_with_the_policy(
    configure: Configure,
) -> None:
    """The KL's text needs no gradient, so there are three forward passes besides training."""
    policy = role_of(configure, f"kto {SFT_FLAGS}")
    tokens = ROWS * 2048
    once = scoring_seconds(policy, parse_cluster(CLUSTER), tokens=tokens, length=2048)
    for flags in ("", "--ds.lora.rank 8"):
        found = seconds(configure, f"kto {SFT_FLAGS} {flags}")
        assert found["score"] == pytest.approx(3 * once, abs=0.06)


def test_distillation_teacher_runs_its_output_layer_in_both_passes(configure: Configure) -> None:
    line = f"kd {SFT_FLAGS} --kd.teacher_model {{llama2-13b}}"
    cluster = parse_cluster(CLUSTER)
    for flags, heads in (("", 2), ("--kd.top_k 20", 1)):
        _, teacher = offline_roles(configure(f"{line} {flags}", CLUSTER), 8, True)
        expected = scoring_seconds(teacher, cluster, tokens=ROWS * 2048, length=2048, heads=heads)
        assert seconds(configure, f"{line} {flags}")["score"] == pytest.approx(expected, abs=0.06)


def test_process_reward_model_needs_few_logits(configure: Configure) -> None:
    """Only a sixteenth of the tokens end a step."""
    computes: list[float] = []
    for line in (f"sft {SFT_FLAGS}", f"prm {SFT_FLAGS} --prm.placeholder_token x"):
        role = role_of(configure, line)
        time = training_time(role, parse_cluster(CLUSTER), tokens=8192, length=2048)
        computes.append(time.compute)
    head = 4096 * 32000
    per_second = 8 * 312e12 * 0.55
    saved = 8192 * 4 * 2 * head * (15 / 16) / per_second
    assert computes[0] - computes[1] == pytest.approx(saved, rel=0.01)


def test_checkpointing_runs_layers_again_in_proportion(configure: Configure) -> None:
    cluster = parse_cluster(CLUSTER)
    computes: list[float] = []
    every = "--model.gradient_checkpointing_enable --model.gradient_checkpointing_every"
    for flags in ("", f"{every} 4", f"{every} 1"):
        role = role_of(configure, f"sft {SFT_FLAGS} {flags}")
        computes.append(training_time(role, cluster, tokens=8192, length=2048).compute)
    assert computes[1] - computes[0] == pytest.approx((computes[2] - computes[0]) / 4)
    per_token = layer_operations(role, 2048)
    assert computes[2] - computes[0] == pytest.approx(8192 * per_token / (8 * 312e12 * 0.55))


def test_sliding_window_layers_attend_to_fewer_tokens() -> None:
    """Three layers attend to T/2 = 2,048 tokens on average, and three to w − w²/(2T) = 960."""
    config = MODELS["llama2-7b"] | {"num_hidden_layers": 6}
    full = ModelRole(name="policy", shape=shape_from_config(config))
    shape = replace(full.shape, windows=(None, 1024) * 3)
    difference = layer_operations(full, 8192) - layer_operations(replace(full, shape=shape), 8192)
    assert difference == pytest.approx(3 * 4 * 4096 * (4096 - 960))


def test_policy_scores_samples_only_if_an_update_needs_it(configure: Configure) -> None:
    """With one optimizer step per batch and no KL, the ratio is 1, so no model has to score."""
    base = (
        "ppo --actor.model_name_or_path {llama2-7b} --algo.advantage.estimator rloo "
        "--rollout.n_samples_per_prompt 8 --rollout.batch_size 128 --train.batch_size 1024 "
        "--train.colocate_all --vllm.num_engines 8"
    )
    alone = seconds(configure, f"{base} --algo.kl.init_coef 0")
    assert "score" not in alone
    repeated = seconds(configure, f"{base} --algo.kl.init_coef 0 --train.max_epochs 2")
    assert repeated["score"] > 0
    adapted = seconds(configure, f"{base} --ds.lora.rank 8 --algo.kl.init_coef 0.01")
    in_reward = 2  # π_old and, without adapters, π_ref
    assert adapted["score"] == pytest.approx(in_reward * repeated["score"], abs=0.15)


def test_sharded_reference_gathers_its_weights(configure: Configure) -> None:
    cluster = parse_cluster("2x8xL40S")
    roles = offline_roles(configure(f"{DPO} --train.micro_batch_size 1", "2x8xL40S"), 16, True)
    whole = replace(roles[1], zero_stage=0)
    times = [
        scoring_seconds(role, cluster, tokens=ROWS * 1024, length=512) for role in (roles[1], whole)
    ]
    assert times[0] > times[1]


def test_ranks_that_split_layers_exchange_the_states_of_all_their_tokens(
    configure: Configure,
) -> None:
    """Each layer has 4 all-reduces of 2 bytes, and each all-reduce sends every state twice."""
    role = role_of(configure, f"sft {SFT_FLAGS} --ds.zero_stage 1 --ds.tensor_parallel_size 8")
    time = training_time(role, parse_cluster(CLUSTER), tokens=8192, length=2048)
    assert time.sent_bytes == 4 * 2 * 2 * 8192 * 32 * 4096


def test_one_device_sends_nothing(configure: Configure) -> None:
    [role] = offline_roles(configure(f"sft {SFT_FLAGS}", "1x80GB"), 1, True)
    assert training_time(role, parse_cluster("1x80GB"), tokens=8192, length=2048).sent_bytes == 0


def test_tensor_parallelism_divides_layers_but_not_experts_or_logits() -> None:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
    shape = shape_from_config(MODELS["llama2-7b"] | {"model_type": "mixtral"} | sizes)
    cluster = parse_cluster(CLUSTER)
    role = ModelRole(name="policy", shape=shape, trained=True, zero_stage=1)
    times = [
        training_time(replace(role, tp=tp), cluster, tokens=8192, length=2048).compute
        for tp in (1, 4)
    ]
    attention = sum(w.numel for w in shape.weights if ".self_attn." in w.name)
    divided = 3 * (2 * attention + 4 * 4096 * 32 * 1024)
    saved = 8192 * divided * (3 / 4) / (312e12 * 0.55)
    assert times[0] - times[1] == pytest.approx(saved)


def test_full_cache_limits_the_sequences_that_an_engine_generates_at_once() -> None:
    """A sequence of 3,072 tokens on average takes 1.5 GiB, so 16 sequences fit into 24.4 GiB."""
    shape = shape_from_config(MODELS["llama2-7b"])
    small, large = (EngineRole(shape=shape, memory_share=share) for share in (0.475, 0.95))
    seconds_of: list[float] = []
    for engine in (small, large):
        seconds_of.append(
            generation_seconds(
                engine,
                parse_cluster("1xA100-80GB"),
                engines=1,
                samples=160,
                prompt=2048,
                answer=2048,
            )
        )
    weights = 2 * shape.parameters
    cache = 16 * 3072 * 2 * 32 * 4096 * 2
    steps = math.ceil(160 / 16) * 2048
    prefill = 160 * 2048 * (layer_operations(small, 4096) + 2 * 4096 * 32000) / (312e12 * 0.55)
    expected = steps * (weights + cache) / (2039e9 * 0.6) + prefill
    assert seconds_of[0] == pytest.approx(expected, rel=1e-3)
    assert seconds_of[1] < seconds_of[0]
