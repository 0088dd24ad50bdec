"""Tests for the estimated duration of a step."""

from __future__ import annotations

import pytest

from openrlhf.planning.cluster import parse_cluster
from openrlhf.planning.offline_roles import offline_roles
from openrlhf.planning.speed import training_time
from openrlhf.planning.step_time import step_lines
from tests.planning.conftest import Configure

CLUSTER = "8xA100-80GB"
DPO = "dpo --model.model_name_or_path {llama2-7b} --ds.zero_stage 3"


def seconds(configure: Configure, line: str) -> dict[str, float]:
    """Return the estimated seconds for each phase of a command's step, and for the entire step."""
    found: dict[str, float] = {}
    for text in step_lines(configure(line, CLUSTER), parse_cluster(CLUSTER)):
        name, _, rest = text.strip().partition(": ")
        found[name] = float(rest.removeprefix("1 x ").split()[0])
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
    assert compute[1] / compute[0] == pytest.approx(2 / 3)
