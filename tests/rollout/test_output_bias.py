"""Weight updates of an output layer that has a bias, like Phi's."""

from __future__ import annotations

import os
import subprocess
import sys

from openrlhf.rollout.engine_settings import engine_environment
from tests.ranks import ROOT

# `load` creates a new bias and then fills it, like vLLM's `CausalMixin` for Transformers models.
PROGRAM = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, record_metadata_for_reloading
from openrlhf.rollout.engine_worker import begin_reload, unwritten_layers

ROWS, WIDTH = 51, 8  # vLLM pads the vocabulary to 64


def load(head, **values):
    for name, value in values.items():
        if name == "bias":
            head._register_bias()
        parameter = getattr(head, name)
        parameter.weight_loader(parameter, torch.full((ROWS, WIDTH) if name == "weight" else (ROWS,), value))


with set_current_vllm_config(VllmConfig()):
    head = ParallelLMHead(ROWS, WIDTH, params_dtype=torch.float32, disable_tp=True)
    model = torch.nn.ModuleDict({"lm_head": head})
    record_metadata_for_reloading(model)
    load(head, weight=1.0, bias=2.0)
    served = head.weight, head.bias  # the tensors that compiled code keeps reading
    for values in ({"weight": 3.0, "bias": 4.0}, {"bias": 6.0, "weight": 5.0}, {"weight": 7.0}):
        begin_reload(model)
        load(head, **values)
        print(unwritten_layers(model))
        finalize_layerwise_reload(model, None)
        assert served[0] is head.weight and served[1] is head.bias
        print(*sorted(float(each) for tensor in served for each in tensor[:ROWS].unique()))
"""  # noqa: E501


def test_unwritten_layers_include_an_output_layer_without_its_new_bias() -> None:
    environment = os.environ | engine_environment("cpu") | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("[]", "3.0 4.0"),
        *("[]", "5.0 6.0"),
        *("['lm_head (408 of 459 elements written)']", "6.0 7.0"),
    ]
