"""Tests that a model's weights are derived exactly from its config.json or file headers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.layer_plan import COLUMN, ROW, split_patterns
from openrlhf.planning.model_files import read_shape
from openrlhf.planning.offline_roles import frozen_role
from openrlhf.planning.roles import ModelRole
from openrlhf.planning.shapes import (
    FAMILIES,
    PlanError,
    SplitError,
    shape_from_config,
    shape_from_headers,
)
from openrlhf.planning.trained import local_size
from tests.planning.models import MODELS, PUBLISHED

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {"head_dim": 32}),
    ("granite", {}),
    ("smollm3", {}),
    ("olmo2", {}),
    ("phi3", {}),
    ("glm4", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen3_moe", MIXTURE),
    ("qwen3_moe", MIXTURE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen2_moe", MIXTURE | {"shared_expert_intermediate_size": 80}),
]


def real_model(model_type: str, extra: dict[str, Any], auto: Any = AutoModelForCausalLM) -> Any:
    config = CONFIG_MAPPING[model_type](**{**SMALL, **extra})
    with torch.device("meta"):
        return auto.from_config(config)


def stored_config(model: Any) -> dict[str, Any]:
    """Return the configuration as written by `save_pretrained`, which omits default values."""
    return json.loads(model.config.to_json_string())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("model_type", "extra"), ARCHITECTURES)
def test_weights_from_config_equal_those_of_the_transformers_model(
    model_type: str, extra: dict[str, Any], tied: bool
) -> None:
    model = real_model(model_type, extra | {"tie_word_embeddings": tied})
    shape = shape_from_config(stored_config(model))
    sizes = {weight.name: weight.shape for weight in shape.weights}
    assert sizes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shape.tied == tied
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_scalar_model_has_a_head_with_one_output(model_type: str) -> None:
    extra = {"num_labels": 1, "num_local_experts": 4}
    if model_type != "mixtral":
        extra = {"num_labels": 1}
    model = real_model(model_type, extra, AutoModelForSequenceClassification)
    causal = real_model(model_type, extra)
    shape = shape_from_config(stored_config(causal)).as_scalar()
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [("mistral", {"sliding_window": 64}), ("gemma2", {}), ("gemma3_text", {}), ("qwen2", {})],
)
def test_windows_equal_those_of_the_transformers_layers(
    model_type: str, extra: dict[str, Any]
) -> None:
    model = real_model(model_type, extra)
    windows: list[int | None] = []
    for layer in model.model.layers:
        windows.append(getattr(layer.self_attn, "sliding_window", None))
    if model_type == "mistral":  # each layer reads the window from the configuration
        windows = [64] * 4
    assert list(shape_from_config(stored_config(model)).windows) == windows


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    shape = shape_from_config(MODELS[name])
    assert shape.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.002)


def test_active_parameters_count_only_the_experts_of_one_token() -> None:
    model = real_model("qwen3_moe", MIXTURE)
    shape = shape_from_config(stored_config(model))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    embeddings = model.model.embed_tokens.weight.numel()
    assert shape.active_parameters == shape.parameters - embeddings - experts // 2


def test_unknown_architecture_is_read_from_file_headers(tmp_path: Path) -> None:
    model = real_model("starcoder2", {})
    stored = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    half = len(stored) // 2
    shards = {"model-1.safetensors": half, "model-2.safetensors": len(stored)}
    weight_map: dict[str, str] = {}
    start = 0
    for shard, end in shards.items():
        part = dict(list(stored.items())[start:end])
        save_file(part, tmp_path / shard)
        weight_map |= dict.fromkeys(part, shard)
        start = end
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    shape = read_shape(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.tied


def test_experts_in_files_are_stacked_as_in_memory() -> None:
    config = {
        **SMALL,
        "model_type": "unknown",
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    headers = {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64)}
    for expert in range(4):
        headers[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] = (48, 64)
    headers["model.layers.0.mlp.experts.up_proj_scale"] = ()
    shape = shape_from_headers(headers, config)
    stacked = [weight.shape for weight in shape.weights if weight.is_expert]
    assert stacked == [(4, 48, 64), ()]
    assert shape.experts == 4
    assert shape.intermediate == 48  # a dense layer's size would be 96


def test_error_for_an_unknown_architecture_without_files_lists_known_architectures() -> None:
    with pytest.raises(PlanError, match="qwen3_moe"):
        shape_from_config({**SMALL, "model_type": "unheard_of"})


def test_missing_hub_model_is_rejected_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError, match="local folder"):
        read_shape("nobody/no-such-model-9f3")


def test_cached_download_is_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--model-a1" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MODELS["llama2-7b"]))
    assert read_shape("owner/model-a1").layers == 32


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "../model", "a/b/c", "~/model"])
def test_missing_folder_is_not_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        read_shape(path)


def test_unknown_architecture_without_weight_files_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel"} | sizes))
    with pytest.raises(PlanError, match="'novel'"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tensor_parallelism_splits_the_layers_of_the_transformers_plan(model_type: str) -> None:
    extra = MIXTURE if model_type.endswith("_moe") else {}
    model = real_model(model_type, {"num_local_experts": 4} if model_type == "mixtral" else extra)
    role = ModelRole(name="policy", shape=shape_from_config(stored_config(model)), tp=2)
    local = {
        weight.name for weight in role.shape.weights if local_size(role, weight) < weight.numel
    }
    try:
        patterns = split_patterns(model.config, 2)
    except UserError:
        patterns = {COLUMN: [], ROW: []}
    split = re.compile("|".join(rf"{each}\.weight" for each in patterns[COLUMN] + patterns[ROW]))
    names = [name for name, _ in model.named_parameters()]
    assert local == {name for name in names if split.fullmatch(name)}


def test_model_without_a_plan_for_splitting_cannot_be_planned_with_tensor_parallelism(
    tmp_path: Path,
) -> None:
    config = {**SMALL, "model_type": "phi3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path))
    with pytest.raises(SplitError, match=r"phi3.*--ds.zero_stage 3"):
        frozen_role("policy", shape, DeepSpeedConfig(tensor_parallel_size=2), 2, on_gpus=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -2},
        {"vocab_size": 0},
        {"num_key_value_heads": "two"},
        {"intermediate_size": {"first": 1}},
        {"sliding_window": "x", "use_sliding_window": True},
        {"sliding_window": 8, "layer_types": ["sliding_attention"]},
        {"sliding_window": 8, "layer_types": 5},
        {"model_type": "qwen3_moe"},  # without the number of experts
    ],
)
def test_unusable_size_in_config_is_a_plan_error(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"config\.json"):
        shape_from_config({**SMALL, "model_type": "qwen2"} | changes)


def test_sizes_per_layer_are_planned_as_the_largest() -> None:
    config = {**SMALL, "model_type": "qwen2", "intermediate_size": [96, 64, 64, 64]}
    assert shape_from_config(config).intermediate == 96


@pytest.mark.parametrize("text", ["[]", "null", "3", '"text"'])
def test_config_that_is_not_an_object_is_a_plan_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=tmp_path.name):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"abc"),
        ("model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}"),
        ("model.safetensors.index.json", b"[]"),
        ("model.safetensors.index.json", b"{}"),
    ],
)
def test_damaged_weight_file_is_a_plan_error(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "novel"}))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(PlanError, match=tmp_path.name):
        read_shape(str(tmp_path))


def test_gpt2_is_read_from_files_without_its_causal_masks(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**sizes))
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in model.transformer.named_parameters():
        stored[name] = parameter.detach()
    for layer in range(2):
        stored[f"h.{layer}.attn.bias"] = torch.zeros(1, 1, 32, 32)
        stored[f"h.{layer}.attn.masked_bias"] = torch.zeros(())
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
    shape = read_shape(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert {weight.layer for weight in shape.weights} == {None, 0, 1}
    assert (shape.hidden, shape.layers, shape.heads, shape.positions) == (64, 2, 4, 32)


def test_quantized_model_is_planned_only_in_4_bits_for_qlora() -> None:
    stored = {"quantization_config": {"quant_method": "bitsandbytes"}}
    shape = shape_from_config({**SMALL, "model_type": "qwen2"} | stored)
    ds = DeepSpeedConfig(load_in_4bit=True)
    assert frozen_role("policy", shape, ds, 1, on_gpus=True).load_in_4bit
    with pytest.raises(PlanError, match=r"policy.*bitsandbytes.*--ds\.load_in_4bit"):
        frozen_role("policy", shape, DeepSpeedConfig(), 1, on_gpus=True)
    with pytest.raises(PlanError, match="fp8"):
        frozen_role("policy", replace(shape, quantization="fp8"), ds, 1, on_gpus=True)


def test_weights_that_process_images_are_read_from_files_and_are_not_layers(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {**SMALL, "head_dim": 32}
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision | sizes)
    model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(stored_config(model)))
    with pytest.raises(PlanError, match=r"model\.safetensors"):
        read_shape(str(tmp_path))
    model.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    decoder = sum(p.numel() for p in model.get_decoder().parameters())
    assert shape.active_parameters == decoder
    layers = [weight for weight in shape.weights if weight.layer is not None]
    assert all(".layers." in w.name and "vision" not in w.name for w in layers)
