"""Tests for the layout check, which detects unsupported models by their outputs, not by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
)

from openrlhf.checks import CheckError, report
from openrlhf.models import packed_attention
from openrlhf.models.loading import (
    LoadSpec,
    ModelError,
    check_is_causal,
    check_positions,
    configuration,
    load_causal_lm,
)
from openrlhf.models.policy import PolicyModel
from openrlhf.models.proof import LENGTHS, attention_reach, prove_layout
from openrlhf.models.scalar import ScalarModel, load_scalar
from openrlhf.ring import Ring
from tests import tiny
from tests.loading import load_spec
from tests.tiny import tiny_config

SIZES: dict[str, Any] = tiny.SIZES | {"vocab_size": 96, "hidden_size": 64, "bos_token_id": 2}
LINEAR_HEADS = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
MAMBA_HEADS = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
# Architectures that would mix packed documents, with the settings that cause the mixing.
MIXING: dict[str, dict[str, Any]] = {
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 64,
    },
    "qwen3_next": {
        **LINEAR_HEADS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": LINEAR_HEADS,
    "falcon_h1": {**MAMBA_HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4, "head_dim": 16},
    "bamba": {**MAMBA_HEADS, "mamba_n_heads": 8, "attn_layer_indices": [1]},
    "jamba": {
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "minimax": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16},
    # Falcon uses its own attention, not ours, and treats the row as one document.
    "falcon": {"ffn_hidden_size": 64},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
}


def check(model: nn.Module) -> None:
    report(*prove_layout(model))


def random_model(kind: str, *, packing: bool, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))
    if packing:
        hf.set_attn_implementation(packed_attention.NAME)
    return hf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MIXING)
def test_model_that_mixes_packed_documents_is_rejected(kind: str, dtype: torch.dtype) -> None:
    """The same model passes the check with padded rows.

    Mixing hardly changes a random model's outputs, but it changes the gradient in any dtype.
    """
    hf = random_model(kind, packing=True, **MIXING[kind]).to(dtype)
    with pytest.raises(
        CheckError, match=r"packed into one row, and mixed the sequences.*--ds\.packing_samples"
    ):
        check(PolicyModel(hf, packing=True))
    if dtype == torch.float32:
        check(PolicyModel(random_model(kind, packing=False, **MIXING[kind]), packing=False))


def test_layout_error_lists_the_layer_types() -> None:
    hf = random_model("lfm2", packing=True, **MIXING["lfm2"])
    with pytest.raises(CheckError, match=r"of type lfm2 \(layers: conv, full_attention\)"):
        check(PolicyModel(hf, packing=True))


def test_missing_mask_in_packed_attention_is_detected() -> None:
    """In Doge, a token attends only to the `keep_window_size` most important tokens.

    Packing changes the result of a sequence that has more than `keep_window_size` tokens.
    """
    hf = random_model("doge", packing=True, keep_window_size=4)
    for name, parameter in hf.named_parameters():
        if name.endswith(".A"):
            parameter.data.normal_()
    with pytest.raises(CheckError, match="apart on average"):
        check(PolicyModel(hf, packing=True))


def windowed(window: int, *, packing: bool) -> PolicyModel:
    torch.manual_seed(0)
    config = tiny_config("llama", max_position_embeddings=2048).to_dict() | {
        "sliding_window": window
    }
    hf = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config | {"model_type": "mistral"})
    )
    if packing:
        hf.set_attn_implementation(packed_attention.NAME)
    return PolicyModel(hf, packing=packing)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("window", [40, 700])
def test_correct_sliding_window_passes_at_any_width(window: int, packing: bool) -> None:
    check(windowed(window, packing=packing))


@pytest.mark.parametrize("window", [4, 40, 700])
def test_missing_sliding_window_is_detected_at_any_width(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "_window_mask", lambda *_: None)
    model = windowed(window, packing=True)
    with pytest.raises(CheckError, match=r"gradient differs|apart on average"):
        check(model)
    model.max_len = window  # no sequence in the run exceeds the window
    if window > sum(LENGTHS):
        check(model)


SPARSE: dict[str, Any] = {
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}


def test_block_sparse_attention_is_rejected_for_packed_rows() -> None:
    hf = random_model("minimax_m3_vl_text", packing=True, **SPARSE)
    with pytest.raises(CheckError, match=r"`block_indices`.*Drop --ds\.packing_samples"):
        check(PolicyModel(hf, packing=True))


@pytest.mark.parametrize(
    ("kind", "changes", "max_len", "reach"),
    [
        ("llama", {}, 4096, 0),
        ("mistral", {"sliding_window": 128}, 4096, 128),
        ("mistral", {"sliding_window": 128}, 128, 0),
        ("mistral", {"sliding_window": 8}, 4096, 0),
        ("doge", {"keep_window_size": 300}, 4096, 300),
        ("minimax_m3_vl_text", {"index_block_size": 32, "index_topk_blocks": 4}, 4096, 128),
        ("deepseek_v4", {"sliding_window": 32, "index_topk": 8}, 4096, 1024),
        ("deepseek_v32", {"index_topk": 64}, 4096, 64),
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 64}, 4096, 0),
    ],
)
def test_attention_reach_comes_from_the_configuration(
    kind: str, changes: dict[str, Any], max_len: int, reach: int
) -> None:
    assert attention_reach(AutoConfig.for_model(kind, **changes), max_len) == reach


@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
def test_error_for_unpackable_attention_names_the_model_type_and_the_flag(kind: str) -> None:
    with pytest.raises(
        CheckError, match=rf"of type {kind}.*keyword arguments.*Drop --ds\.packing_samples"
    ) as refused:
        check(PolicyModel(random_model(kind, packing=True), packing=True))
    assert "Error" not in str(refused.value)  # the message does not blame the model's code
    check(PolicyModel(random_model(kind, packing=False), packing=False))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("kind", "seen"), [("llama4_text", "Llama4ForCausalLM"), ("modernbert-decoder", "Linear")]
)
def test_error_for_an_architecture_without_a_separate_decoder_names_the_type_found(
    kind: str, seen: str, packing: bool
) -> None:
    sizes = {
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "head_dim": 16,
        "no_rope_layers": [1, 0],
    }
    with pytest.raises(CheckError) as refused:
        check(PolicyModel(random_model(kind, packing=packing, **sizes), packing=packing))
    assert kind in str(refused.value) and seen in str(refused.value)
    assert "Error" not in str(refused.value) and "--ds.packing_samples" not in str(refused.value)


@pytest.mark.parametrize("packing", [False, True])
def test_architecture_with_in_place_embedding_scaling_passes(packing: bool) -> None:
    sizes = {"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    check(PolicyModel(random_model("ctrl", packing=packing, **sizes), packing=packing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    "kind", ["qwen2-tied", "llama", "mistral-windowed", "qwen3", "qwen3-moe", "mixtral"]
)
def test_correct_model_passes_in_every_layout_and_dtype(
    kind: str, packing: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    config = tiny_config(kind)
    hf = AutoModelForCausalLM.from_config(config).to(dtype)
    config.num_labels = 1
    scalar = AutoModelForSequenceClassification.from_config(config).to(dtype)
    for model in (hf, scalar):
        if packing:
            model.set_attn_implementation(packed_attention.NAME)
    check(PolicyModel(hf, packing=packing))
    check(ScalarModel(scalar, packing=packing))


def test_reward_model_that_mixes_packed_documents_is_rejected() -> None:
    config = AutoConfig.for_model("jamba", **SIZES | MIXING["jamba"], num_labels=1)
    torch.manual_seed(0)
    hf = AutoModelForSequenceClassification.from_config(config)
    check(ScalarModel(hf, packing=False))
    hf.set_attn_implementation(packed_attention.NAME)
    with pytest.raises(CheckError, match="mixed the sequences"):
        check(ScalarModel(hf, packing=True))


def test_nearly_equal_values_far_from_zero_may_differ_by_rounding() -> None:
    """A trained reward model scored random texts as −1.62 ± 0.007; bfloat16 resolves ± 0.004."""
    torch.manual_seed(0)
    hf = AutoModelForSequenceClassification.from_config(tiny_config("qwen2-tied", num_labels=1))
    with torch.no_grad():
        embedding = hf.get_input_embeddings().get_parameter("weight")
        embedding.copy_(torch.randn(embedding.shape[1]) + 1e-3 * embedding)
        hf.score.weight.copy_(0.1 * torch.randn_like(hf.score.weight) + 0.05 * embedding[:1].sign())
    hf = hf.to(torch.bfloat16)
    with torch.no_grad():
        values = ScalarModel(hf, packing=False)(torch.arange(3, 20), torch.tensor([0, 17])).values
    assert float(values.mean().abs()) > 1 > 100 * float(values.std()) > 0
    check(ScalarModel(hf, packing=False))


@pytest.mark.parametrize(("kind", "name"), [("qwen2", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_attention_dropout_is_rejected_with_a_ring(kind: str, name: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=64, **sizes)
    setattr(config, name, 0.2)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=packed_attention.NAME)
    model = PolicyModel(hf, packing=True)
    model.ring = Ring(group=cast(Any, None), ranks=(0, 1), rank=0)
    [finding] = prove_layout(model)
    assert finding.fails
    assert name in finding.fix
    assert "0.2" in finding.seen


def test_layout_check_leaves_the_model_and_the_rng_state_unchanged() -> None:
    torch.manual_seed(0)
    config = tiny_config("llama", attention_dropout=0.5)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=packed_attention.NAME)
    model = PolicyModel(hf, packing=True).train()
    kept = next(model.parameters())
    kept.grad = torch.ones_like(kept)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    before, random = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert hf.config._attn_implementation == packed_attention.NAME
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert torch.equal(kept.grad, torch.ones_like(kept))
    assert all(p.grad is None for p in model.parameters() if p is not kept)


# Configuration checks


def spec_of(folder: Path, config: PretrainedConfig, **changes: Any) -> LoadSpec:
    config.save_pretrained(folder)
    settings = {"param_dtype": "fp32", "attention": "sdpa", "packing": False} | changes
    return load_spec(path=str(folder), **settings)


@pytest.mark.parametrize(
    ("kind", "entry"),
    [("gemma2", "final_logit_softcapping"), ("recurrent_gemma", "logits_soft_cap")],
)
def test_transformed_logits_are_detected_from_the_configuration_alone(
    kind: str, entry: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError,
        match=rf"transforms its logits after the output layer \(config\.{entry} = 30\.0\)",
    ):
        check_is_causal(
            spec_of(tmp_path, AutoConfig.for_model(kind, **SIZES, architectures=["AForCausalLM"]))
        )


def test_multimodal_model_is_detected_from_the_configuration_alone(tmp_path: Path) -> None:
    config = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"])
    with pytest.raises(
        ModelError,
        match=r"not a text-only model \(Qwen3_5ForConditionalGeneration\)",
    ):
        check_is_causal(spec_of(tmp_path, config))


def test_error_for_a_missing_attention_implementation_names_the_flag(tmp_path: Path) -> None:
    random_model("mamba", packing=False, state_size=8).save_pretrained(tmp_path)
    spec = load_spec(path=str(tmp_path), param_dtype="fp32", attention="sdpa", packing=True)
    with pytest.raises(
        ModelError, match=r"does not support sdpa attention: drop --ds\.packing_samples"
    ):
        load_causal_lm(spec)


def test_error_for_an_architecture_that_ignores_packed_attention_names_the_flag(
    tmp_path: Path,
) -> None:
    random_model("falcon", packing=False, **MIXING["falcon"]).save_pretrained(tmp_path)
    spec = load_spec(path=str(tmp_path), param_dtype="fp32", attention="sdpa", packing=True)
    with pytest.raises(
        ModelError, match=r"does not support sdpa attention: drop --ds\.packing_samples"
    ):
        load_causal_lm(spec)
    load_causal_lm(load_spec(tmp_path))


def test_error_for_an_architecture_without_a_scalar_head_names_the_model_type(
    tmp_path: Path,
) -> None:
    random_model("lfm2", packing=False, **MIXING["lfm2"]).save_pretrained(tmp_path)
    spec = load_spec(path=str(tmp_path), param_dtype="fp32", attention="sdpa", packing=False)
    with pytest.raises(ModelError, match=r"'lfm2' cannot be used.*none with a plain linear head"):
        load_scalar(spec)


@pytest.mark.parametrize("config", [None, "{}"], ids=["empty folder", "no model type"])
def test_error_for_a_folder_without_a_model_contains_its_path(
    config: str | None, tmp_path: Path
) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=str(tmp_path)):
        check_is_causal(
            load_spec(path=str(tmp_path), param_dtype="fp32", attention="sdpa", packing=False)
        )


# Positions


def longrope_config() -> PretrainedConfig:
    """Return a configuration with 64 positions, which LongRoPE extends from 16.

    Up to 16 tokens, all frequencies have their original values; above 16, some frequencies are
    lower.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": 16,
    }
    changes = {
        "hidden_size": 32,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
    }
    return AutoConfig.for_model("phi3", **SIZES | changes, rope_parameters=rope)


@pytest.mark.parametrize(("max_len", "factor"), [(16, "short"), (40, "long")])
@pytest.mark.parametrize("packing", [False, True])
def test_longrope_frequencies_are_independent_of_the_batch(
    max_len: int, factor: str, packing: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(longrope_config()).save_pretrained(tmp_path)
    spec = load_spec(
        path=str(tmp_path), param_dtype="fp32", attention="sdpa", packing=packing, max_len=max_len
    )
    model = PolicyModel(load_causal_lm(spec), packing=packing)
    lengths = [7, max_len]
    tokens = torch.randint(3, 96, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    wanted = torch.ones(sum(lengths), dtype=torch.bool)
    with torch.no_grad():
        together = model(tokens, torch.tensor([0, 7, sum(lengths)]), wanted).logprobs
        alone = model(tokens[:7], torch.tensor([0, 7]), wanted[:7]).logprobs
        longer = model(
            torch.cat([tokens[:7], tokens[:9]]),
            torch.tensor([0, 16]),
            torch.ones(16, dtype=torch.bool),
        )
    torch.testing.assert_close(together[:7], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(longer.logprobs[:7], alone, atol=1e-6, rtol=0)
    rotary = model.hf.get_decoder().rotary_emb
    base = 1 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    chosen = longrope_config().rope_parameters[f"{factor}_factor"]
    torch.testing.assert_close(rotary.inv_freq, base / torch.tensor(chosen))


def test_dynamic_rope_is_rejected_beyond_the_position_limit(
    tmp_path: Path,
) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = tiny_config("llama", rope_parameters=dynamic)
    with pytest.raises(ModelError, match=r"rope_type dynamic.*--data\.max_len is 513.* 512"):
        configuration(spec_of(tmp_path, config, max_len=513))
    configuration(spec_of(tmp_path, config, max_len=512))


def test_dynamic_rope_in_a_single_layer_type_is_rejected(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = AutoConfig.for_model("gemma3_text", **SIZES, rope_parameters=rope)
    with pytest.raises(ModelError, match=r"rope_type dynamic.*--data\.max_len is 513"):
        configuration(spec_of(tmp_path, config, max_len=513))


def test_max_len_above_the_position_limit_is_rejected_without_rope_scaling(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=r"--data\.max_len is 513.* 512 positions"):
        check_positions(spec_of(tmp_path, tiny_config("llama"), max_len=513))
    check_positions(spec_of(tmp_path, longrope_config(), max_len=1000))


def test_max_len_above_the_positions_of_a_model_without_rope_is_rejected(tmp_path: Path) -> None:
    """Such a model has a table of positions; a longer text would raise an IndexError."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    config = AutoConfig.for_model("gpt2", vocab_size=64, **sizes)
    with pytest.raises(ModelError, match=r"--data\.max_len is 129.* 128 positions"):
        configuration(spec_of(tmp_path, config, max_len=129))
    configuration(spec_of(tmp_path, config, max_len=128))
