"""Tests of an optimizer step's memory use.

The expected sizes are those of the tensors that DeepSpeed creates in a step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrlhf.planning.constants import CPU, CUDA
from openrlhf.planning.memory import RoleMemory
from openrlhf.planning.prediction import predict_role
from openrlhf.planning.roles import ModelRole, Pass
from openrlhf.planning.shapes import shape_from_config
from openrlhf.planning.usage import Instant
from openrlhf.units import MIB
from tests.planning.models import MEASURED, MODELS

MEASURED_STEPS = (9844, 10006, 10206, 9862)  # MiB in the table of docs/gpu.md
BATCH = Pass(tokens=16, longest=16, scored=16)
SAMPLES = 2 * 2 * 4_000_000  # bytes of the samples with which changed weights are counted
BUCKET = 500_000_000  # elements


def step_bytes(role: ModelRole) -> int:
    return RoleMemory(role, CUDA).train_peaks()[Instant.STEP].total


@pytest.fixture
def policy() -> ModelRole:
    shape = shape_from_config(MEASURED)
    return ModelRole(name="policy", shape=shape, trained=True, zero_stage=1, training=BATCH)


def test_prediction_of_measured_steps_is_within_the_reserve(policy: ModelRole) -> None:
    predicted = step_bytes(policy) / MIB
    assert round(predicted) == 9722
    for measured in MEASURED_STEPS:
        assert predicted < measured < predicted * (1 + CUDA.reserve)


def test_step_of_stage_1_in_bfloat16_holds_two_copies_of_the_gradients(policy: ModelRole) -> None:
    """Bytes per parameter: weights 2, masters 4, moments 8, gradients 2 + 4, and copies 4 + 2.

    Only masters and moments are divided among the ranks.
    """
    for ranks in (1, 4):
        parameters = policy.shape.parameters
        expected = (14 + 12 / ranks) * parameters + SAMPLES
        assert step_bytes(replace(policy, dp=ranks)) == pytest.approx(expected, rel=1e-6)


def test_step_of_stage_1_in_float32_holds_the_reduce_bucket(policy: ModelRole) -> None:
    """Weights, masters, two moments and gradients take 4 bytes each per parameter.

    If a model exceeds the bucket, the rank's sums take another 4 bytes per parameter.
    """
    role = replace(policy, dtype="fp32")
    parameters = role.shape.parameters
    assert step_bytes(role) == 20 * parameters + 4 * BUCKET
    wide = MODELS["llama2-7b"]
    role = replace(role, shape=shape_from_config(wide))
    assert step_bytes(role) == 24 * role.shape.parameters


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_temporary_gradients_of_a_step_are_the_same_on_a_cpu(policy: ModelRole, stage: int) -> None:
    role = replace(policy, dp=4, zero_stage=stage)
    assert RoleMemory(role, CPU).gradients.step == RoleMemory(role, CUDA).gradients.step > 0


def test_reduce_bucket_on_a_cpu_takes_up_only_what_is_written(policy: ModelRole) -> None:
    """Stage 1 in float32 writes to the bucket in the step: the gradients move to the bucket."""
    role = replace(policy, dtype="fp32", dp=4)
    gradients = RoleMemory(role, CPU).gradients
    parameters = role.shape.parameters
    assert (gradients.kept, gradients.backward) == (4 * parameters, 0)
    assert gradients.step == 4 * parameters


def test_offloaded_step_of_stage_1_holds_bucket_and_copies(policy: ModelRole) -> None:
    """The gradients in the bucket (4), their copies (4 + 2), and this rank's sums (4)."""
    role = replace(policy, adam_offload=True)
    parameters = role.shape.parameters
    expected = 2 * parameters + 4 * BUCKET + 10 * parameters + SAMPLES
    assert step_bytes(role) == pytest.approx(expected, rel=1e-6)


def test_offloaded_float32_step_of_one_rank_copies_no_gradients(policy: ModelRole) -> None:
    """Only the float64 copy for the norm is added to the gradients."""
    role = replace(policy, adam_offload=True, dtype="fp32")
    assert RoleMemory(role, CPU).gradients.step == 8 * role.shape.largest_weight
    two = RoleMemory(replace(role, dp=2), CPU).gradients
    assert two.step == 4 * role.shape.parameters


def test_norm_copies_the_largest_gradient_in_float64(policy: ModelRole) -> None:
    """Stage 2: weights, masters, moments, gradients, and 8 bytes per copied element."""
    largest = policy.shape.largest_weight
    parameters = policy.shape.parameters
    stage2 = replace(policy, zero_stage=2, dp=4)
    expected = (2 + 12 / 4 + 4 / 4) * parameters + 8 * largest + SAMPLES
    assert step_bytes(stage2) == pytest.approx(expected, rel=1e-6)
    many = replace(policy, zero_stage=2, dp=100)
    part = parameters / 100  # smaller than the largest weight
    expected = (2 + 16 / 100) * parameters + 8 * part + SAMPLES
    assert step_bytes(many) == pytest.approx(expected, rel=1e-3)
    offloaded = replace(policy, zero_stage=3, dp=4, adam_offload=True)  # gradients in CPU memory
    assert RoleMemory(offloaded, CUDA).gradients.step == 0


@pytest.mark.parametrize("zpg", [2, 4])
def test_second_copy_takes_the_weights_divided_by_its_ranks(policy: ModelRole, zpg: int) -> None:
    """The copy exists from the first training pass until training ends."""
    plain = replace(policy, zero_stage=3, dp=8)
    copied = replace(plain, zpg=zpg)
    before, after = predict_role(plain, CUDA), predict_role(copied, CUDA)
    for instant in Instant:
        trains = instant in (Instant.FORWARD, Instant.BACKWARD, Instant.STEP)
        added = after[instant].total - before[instant].total
        expected = 2 * policy.shape.parameters // zpg if trains else 0
        assert added == pytest.approx(expected, rel=1e-6)
