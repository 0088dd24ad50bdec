"""Tests that the planner's copies of the product's constants are up to date.

The planner does not import torch, so it cannot import these modules.
"""

from __future__ import annotations

from openrlhf.algorithms import tensors
from openrlhf.planning import activations, memory, rl_roles
from openrlhf.rollout import engine_settings
from openrlhf.training import masters
from openrlhf.workers import base


def test_sizes_that_the_planner_repeats_equal_those_of_the_product() -> None:
    assert activations.CHUNK_LOGITS == tensors.CHUNK_LOGITS
    assert memory.BUCKET_BYTES == base.BUCKET_BYTES
    assert memory.SAMPLED_WEIGHTS == masters.MAX_SAMPLED_WEIGHTS
    assert rl_roles.CPU_CACHE_BYTES == engine_settings.CPU_KV_CACHE_BYTES
