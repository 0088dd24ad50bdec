"""Properties of predictions: a memory-saving setting never increases the memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from openrlhf.planning.constants import CPU, CUDA, Constants
from openrlhf.planning.prediction import drive_bytes, predict_host, predict_role
from openrlhf.planning.roles import ModelRole, Pass
from openrlhf.planning.shapes import shape_from_config
from openrlhf.planning.usage import Instant, Usage
from tests.planning.conftest import MakePlan
from tests.planning.models import MODELS

SHAPE = shape_from_config(MODELS["llama2-7b"])
BATCH = Pass(tokens=8192, longest=2048, scored=8192)
ROLE = ModelRole(
    name="policy",
    shape=SHAPE,
    dp=8,
    zero_stage=2,
    trained=True,
    training=BATCH,
    scoring=BATCH,
    window=4,
    publishes=True,
)
STAGES = [0, 1, 2, 3]
DTYPES = ["bf16", "fp32"]


def peaks(role: ModelRole, constants: Constants = CUDA) -> dict[Instant, int]:
    """Return the total bytes at each instant."""
    usage = predict_role(role, constants)
    return {instant: usage[instant].total for instant in Instant}


def assert_no_more(smaller: dict[Instant, int], larger: dict[Instant, int]) -> None:
    assert {instant: smaller[instant] <= larger[instant] for instant in Instant} == dict.fromkeys(
        Instant, True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_more_ranks_never_need_more_memory_per_rank(
    stage: int, dtype: str, device: Constants
) -> None:
    totals: list[dict[Instant, int]] = []
    for ranks in (2, 4, 8, 64):
        role = replace(ROLE, zero_stage=stage, dtype=dtype, dp=ranks)
        totals.append(peaks(role, device))
    for fewer, more in pairwise(totals):
        assert_no_more(more, fewer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_fewer_tokens_never_need_more_memory(stage: int, dtype: str) -> None:
    role = replace(ROLE, zero_stage=stage, dtype=dtype)
    half = Pass(tokens=4096, longest=2048, scored=4096)
    assert_no_more(peaks(replace(role, training=half, scoring=half)), peaks(role))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "saving",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "checkpoint_every": 4},
        {"gradient_checkpointing": True, "checkpoint_offload": True},
        {"adam_offload": True},
        {"lora_rank": 16},
        {"lora_rank": 16, "load_in_4bit": True},
        {"flash": True},
        {"window": 1},
        {"entropy": False},
        {"tp": 2},
        {"sleeps": True},
    ],
    ids=str,
)
def test_memory_saving_settings_never_need_more_memory(
    stage: int, saving: dict[str, object]
) -> None:
    role = replace(ROLE, zero_stage=stage, entropy=True)
    if stage == 0 and "adam_offload" in saving:
        return  # a rule refuses this combination
    sparing: ModelRole = replace(role, **saving)  # pyright: ignore[reportArgumentType]
    kept = (Instant.FORWARD, Instant.BACKWARD, Instant.STEP, Instant.IDLE, Instant.SCORE)
    before, after = peaks(role), peaks(sparing)
    assert [instant for instant in kept if after[instant] > before[instant]] == []


def test_offload_moves_the_optimizer_state_to_cpu_memory() -> None:
    offloaded = replace(ROLE, zero_stage=3, adam_offload=True)
    device = predict_role(offloaded, CUDA)[Instant.STEP]
    host = predict_host(offloaded, CUDA)[Instant.STEP]
    assert device.gradients == 0
    assert device.optimizer < predict_role(ROLE, CUDA)[Instant.STEP].optimizer / 100
    # master weights, two moments, and two buffers of gradients
    assert host.optimizer == pytest.approx(20 * SHAPE.parameters / 8, rel=0.01)


def test_drive_holds_what_offload_would_keep_in_cpu_memory() -> None:
    in_memory = replace(ROLE, zero_stage=3, adam_offload=True, param_offload=True)
    optimizer = replace(in_memory, optimizer_on_drive=True)
    both = replace(optimizer, weights_on_drive=True)
    for role in (optimizer, both):
        assert predict_role(role, CUDA) == predict_role(in_memory, CUDA)
        for instant, usage in predict_host(role, CUDA).items():
            before = predict_host(in_memory, CUDA)[instant]
            assert usage.optimizer == 0
            assert usage.weights == (before.weights if role is optimizer else 0)
    held = predict_host(in_memory, CUDA)[Instant.STEP]
    assert drive_bytes(in_memory, CUDA) == 0
    assert drive_bytes(optimizer, CUDA) == held.optimizer
    assert drive_bytes(both, CUDA) == held.optimizer + held.weights


def test_sleep_moves_the_training_state_between_updates() -> None:
    asleep = replace(ROLE, sleeps=True)
    assert predict_role(asleep, CUDA)[Instant.GENERATE].optimizer < 2**25
    assert predict_role(asleep, CUDA)[Instant.STEP] == predict_role(ROLE, CUDA)[Instant.STEP]
    assert predict_host(asleep, CUDA)[Instant.GENERATE].optimizer > 0
    assert predict_host(asleep, CUDA)[Instant.STEP].optimizer == 0


def test_cpu_prediction_includes_what_a_gpu_run_keeps_in_cpu_memory() -> None:
    offloaded = replace(ROLE, adam_offload=True, ema=True)
    cpu = predict_role(offloaded, CPU)[Instant.IDLE].optimizer
    host = predict_host(offloaded, CPU)[Instant.IDLE].optimizer
    assert cpu >= host > 0


def test_zero_stages_shard_the_states_described_in_the_paper() -> None:
    """Stage 1 shards the optimizer state, stage 2 also gradients, and stage 3 also weights.

    Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 16 bytes per parameter with mixed
    precision, of which 12 are the optimizer state.
    """
    parameters = SHAPE.parameters
    held: dict[int, Usage] = {}
    for stage in (1, 2, 3):
        role = replace(ROLE, zero_stage=stage, dp=64)
        held[stage] = predict_role(role, CUDA)[Instant.STEP]
        masters_and_moments = held[stage].optimizer - 2 * min(parameters // 64, 4_000_000)
        assert masters_and_moments == pytest.approx(12 * parameters / 64, rel=0.01)
    assert held[1].gradients > 4 * parameters
    norm = 8 * min(SHAPE.largest_weight, parameters // 64)  # a copy of one gradient in float64
    assert held[2].gradients - norm == pytest.approx(4 * parameters / 64, rel=0.01)
    assert held[2].weights == 2 * parameters
    assert held[3].weights < held[2].weights / 3


def test_recomputing_more_layers_needs_less_memory_and_offload_moves_their_inputs() -> None:
    roles = [replace(ROLE, gradient_checkpointing=True, checkpoint_every=n) for n in (1, 2, 4)]
    activations = [predict_role(role, CUDA)[Instant.BACKWARD].activations for role in roles]
    assert sorted(activations) == activations
    offloaded = replace(roles[0], checkpoint_offload=True)
    moved = predict_host(offloaded, CUDA)[Instant.BACKWARD].activations
    assert moved == 32 * BATCH.tokens * 2 * SHAPE.hidden
    assert predict_host(offloaded, CUDA)[Instant.STEP].activations == 0
    saved = predict_role(roles[0], CUDA)[Instant.FORWARD].activations
    left = predict_role(offloaded, CUDA)[Instant.FORWARD].activations
    assert saved - left == pytest.approx(CUDA.allocator_factor * moved, rel=1e-3)


def test_distillation_keeps_a_teachers_states_instead_of_its_logits(plan: MakePlan) -> None:
    line = (
        "kd --model.model_name_or_path {llama2-7b} --kd.teacher_model {llama2-7b} "
        "--ds.packing_samples --train.micro_batch_size"
    )
    logits: list[int] = []
    for rows in (2, 4):
        peaks = plan(f"{line} {rows}", "8xA100-80GB").pools[0].at(Instant.BACKWARD)
        logits.append(peaks["policy"].logits)
    tokens = 2 * 2048
    # the teacher's hidden states, and the gradient of the student's hidden states
    assert logits[1] - logits[0] == pytest.approx(4 * tokens * SHAPE.hidden, rel=0.1)


def test_ring_divides_the_activations(plan: MakePlan) -> None:
    line = (
        "sft --model.model_name_or_path {llama2-7b} --ds.zero_stage 3 --ds.packing_samples "
        "--train.micro_batch_size 1 --data.max_len 32768"
    )
    whole = plan(line, "8xA100-80GB").pools[0].at(Instant.FORWARD)["policy"]
    ring = plan(f"{line} --ds.ring_attn_size 4", "8xA100-80GB").pools[0].at(Instant.FORWARD)
    assert ring["policy"].activations == pytest.approx(whole.activations / 4, rel=0.02)
