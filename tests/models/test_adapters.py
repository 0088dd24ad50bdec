"""Adapters: training, merging, saving and disabling.

Results are compared with plain Transformers, PEFT and float64 loops.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, get_peft_model
from peft import LoraConfig as PeftConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from openrlhf.checkpoints.export import export_hf
from openrlhf.cli import lora_combiner
from openrlhf.config.flags import UserError
from openrlhf.config.shared import LoraConfig, TrainedModelConfig
from openrlhf.core.batches import offsets_of
from openrlhf.models.adapters import adapters_off
from openrlhf.models.loading import (
    STEP_TOKENS,
    LoadSpec,
    check_causal_lm,
    load_causal_lm,
    step_tokens,
)
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scalar import load_scalar
from openrlhf.training.whole import trained_tensors, whole_tensors
from tests.config.commands import violations
from tests.loading import load_spec
from tests.ranks import ROOT
from tests.tiny import character_tokenizer, save_tiny_model

KINDS = ["qwen2-tied", "llama", "qwen3-moe"]
LORA = LoraConfig(rank=4, alpha=12)
TOKENS = torch.tensor([[5, 9, 33, 17, 8, 21, 40], [11, 12, 6, 30, 59, 4, 7]])


def spec(path: str, lora: LoraConfig = LORA, **more: Any) -> LoadSpec:
    return load_spec(
        path=path,
        **{"param_dtype": "fp32", "attention": "sdpa", "packing": False, "lora": lora, **more},
    )


def moved(hf: Any) -> Any:
    """Set the model's adapters to random values, as if they had been trained."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return hf.eval()


def test_new_adapters_do_not_change_the_generators_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generators of two GPUs would otherwise draw the same dropout masks."""
    path = save_tiny_model(tmp_path)
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    load_causal_lm(spec(path, seed=7))
    assert not seeds


def logits(hf: Any) -> Tensor:
    with torch.no_grad():
        return hf(TOKENS).logits


def export(hf: Any, folder: Path) -> str:
    state = {each.name: each.make() for each in trained_tensors(hf)}
    export_hf([list(state.items())], hf, character_tokenizer(), str(folder), writes=True)
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_merged_weight_matches_a_float64_loop(
    kind: str, variant: dict[str, bool], tmp_path: Path
) -> None:
    hf = moved(
        load_causal_lm(
            spec(save_tiny_model(tmp_path, kind), LoraConfig(rank=4, alpha=12, **variant))
        )
    )
    scale = 12 / (math.sqrt(4) if "rslora" in variant else 4)
    merged = {each.name: each.make() for each in whole_tensors(hf)}
    checked = 0
    for name, layer in hf.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        w, a, b = (
            m.weight.detach().double()
            for m in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
        )
        magnitude = (
            layer.lora_magnitude_vector["default"].weight.detach().double()
            if "dora" in variant
            else None
        )
        for i in (0, len(w) - 1):
            row = [
                float(w[i, j] + scale * sum(b[i, k] * a[k, j] for k in range(4)))
                for j in range(w.shape[1])
            ]
            if magnitude is not None:
                length = math.sqrt(sum(x * x for x in row))
                row = [x * float(magnitude[i]) / length for x in row]
            torch.testing.assert_close(
                merged[f"{name}.weight"][i].double(), torch.tensor(row).double(), atol=1e-6, rtol=0
            )
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [{}, {"dora": True}], ids=str)
def test_merging_keeps_the_adapted_logits_and_disabling_adapters_restores_the_base(
    kind: str, variant: dict[str, bool], tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, kind)
    hf = load_causal_lm(spec(path, LoraConfig(rank=4, **variant))).eval()
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = logits(plain)
    assert torch.equal(logits(hf), base)  # new adapters do not change the logits
    assert (logits(moved(hf)) - base).abs().max() > 0.01
    with adapters_off(hf):
        assert torch.equal(logits(hf), base)
    tensors = list(whole_tensors(hf))
    assert [each.name for each in tensors] == [name for name, _ in plain.named_parameters()]
    for each in tensors:
        assert each.shape == tuple(each.make().shape)
        plain.get_parameter(each.name).data.copy_(each.make())
    torch.testing.assert_close(logits(plain), logits(hf), atol=2e-6, rtol=0)
    assert all(
        ".lora_" in name for name, parameter in hf.named_parameters() if parameter.requires_grad
    )


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_export_loads_in_peft_and_merges_with_lora_combiner(
    dora: bool, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path / "base")
    hf = moved(load_causal_lm(spec(path, LoraConfig(rank=4, dora=dora))))
    adapter = export(hf, tmp_path / "adapter")
    assert torch.equal(
        logits(AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)), logits(hf)
    )
    flags = (
        f"--model_path {path} --lora_path {adapter} --output_path {tmp_path / 'merged'} "
        "--ds.param_dtype fp32"
    )
    command = [sys.executable, "-m", "openrlhf.cli.main", "lora_combiner", *flags.split()]
    # The command runs in a separate process, because the test process has imported PEFT.
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert (
        done.stdout
        == f"Wrote the merged model to {tmp_path / 'merged'} in fp32 (--ds.param_dtype).\n"
    )
    assert "is being merged into" not in done.stderr  # the notice about a different base model
    assert "gemm_4bit" not in done.stdout + done.stderr  # a bitsandbytes warning about a kernel
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(hf), atol=2e-6, rtol=0)
    assert (tmp_path / "merged/tokenizer.json").exists()


@pytest.mark.parametrize("prefix", ["score", "value"])
def test_scalar_head_is_fully_trained_and_saved_with_the_adapter(
    prefix: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path / "base", "llama")
    model = load_scalar(spec(path), head_prefix=prefix, seed=3)
    model.set_scale(0.5, 2.0)
    trained = [
        name for name, p in model.hf.named_parameters() if p.requires_grad and ".lora_" not in name
    ]
    assert trained == [f"{prefix}.weight"]
    hf = moved(model.hf)
    adapter = export(hf, tmp_path / "adapter")
    if prefix == "score":  # Transformers' name for the head
        again = AutoPeftModelForSequenceClassification.from_pretrained(
            adapter, num_labels=1, dtype=torch.float32
        )
        assert torch.equal(logits(again), logits(hf))
    flags = (
        f"--is_rm --model_path {path} --lora_path {adapter} --output_path {tmp_path / 'm'} "
        "--ds.param_dtype fp32"
    )
    lora_combiner.main(flags.split())
    merged = load_scalar(spec(str(tmp_path / "m"), LoraConfig()), require_head=True, normalize=True)
    assert (merged.mean, merged.std) == (0.5, 2.0)
    torch.testing.assert_close(logits(merged.hf), logits(hf), atol=2e-6, rtol=0)
    if prefix == "score":
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
        torch.testing.assert_close(logits(plain), logits(hf), atol=2e-6, rtol=0)


def test_merged_process_reward_model_keeps_its_reward_tokens(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base")
    hf = load_causal_lm(spec(path))
    hf.config.update({STEP_TOKENS: {"placeholder_token": "?", "reward_tokens": ["+", "-"]}})
    adapter = export(hf, tmp_path / "adapter")
    lora_combiner.main(
        f"--model_path {path} --lora_path {adapter} --output_path {tmp_path / 'm'}".split()
    )
    assert step_tokens(load_spec(tmp_path / "m")) == ("?", ["+", "-"])


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=str,
)
def test_merging_keeps_the_logits_for_any_target_modules(
    settings: dict[str, list[str]], kind: str, tmp_path: Path
) -> None:
    """Adapters from other frameworks may adapt tied embeddings."""
    path = save_tiny_model(tmp_path / "base", kind)
    beside = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        PeftConfig(r=4, task_type="CAUSAL_LM", **settings),
    )
    moved(beside).save_pretrained(str(tmp_path / "adapter"))
    flags = (
        f"--model_path {path} --lora_path {tmp_path / 'adapter'} --output_path {tmp_path / 'm'} "
        "--ds.param_dtype fp32"
    )
    lora_combiner.main(flags.split())
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")),
        logits(beside),
        atol=2e-5,
        rtol=0,
    )
    load_causal_lm(load_spec(tmp_path / "m"))


def test_lora_combiner_rejects_an_adapter_with_nan_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_tiny_model(tmp_path / "base")
    hf = load_causal_lm(spec(path))
    next(p for p in hf.parameters() if p.requires_grad).data[0, 0] = torch.nan
    adapter = export(hf, tmp_path / "adapter")
    flags = f"--model_path {path} --lora_path {adapter} --output_path {tmp_path / 'm'}"
    with pytest.raises(SystemExit):
        lora_combiner.main(flags.split())
    assert str(tmp_path / "adapter") in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_lora_combiner_prints_a_notice_for_a_different_base_of_the_same_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny_model(tmp_path / "base")
    adapter, other = (
        export(load_causal_lm(spec(base)), tmp_path / "adapter"),
        save_tiny_model(tmp_path / "other"),
    )
    lora_combiner.main(
        f"--model_path {other} --lora_path {adapter} --output_path {tmp_path / 'm'}".split()
    )
    printed = capsys.readouterr().err
    assert f"--lora_path {adapter}" in printed
    assert str(base) in printed and str(other) in printed


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"hidden_size": 64}], ids=str)
def test_lora_combiner_rejects_an_adapter_for_a_differently_shaped_model(
    changes: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = export(load_causal_lm(spec(save_tiny_model(tmp_path / "base"))), tmp_path / "adapter")
    other = save_tiny_model(tmp_path / "other", **changes)
    flags = f"--model_path {other} --lora_path {adapter} --output_path {tmp_path / 'm'}"
    with pytest.raises(SystemExit):
        lora_combiner.main(flags.split())
    printed = capsys.readouterr().err
    assert f"--lora_path {adapter}" in printed and f"--model_path {other}" in printed
    with pytest.raises(SystemExit):  # without a head, the adapter looks like a language model's
        lora_combiner.main(f"--is_rm {flags}".split())
    assert f"--lora_path {adapter}" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_train_sft_rejects_an_adapter_as_a_model(tmp_path: Path) -> None:
    adapter = export(load_causal_lm(spec(save_tiny_model(tmp_path / "base"))), tmp_path / "adapter")
    [sentence] = violations("train_sft", f"--model.model_name_or_path {adapter}")
    assert sentence.endswith(
        "is an adapter: first merge it into its base model with openrlhf lora_combiner."
    )


@pytest.mark.parametrize(
    ("kind", "names"), [("llama", ("q_proj", "nose")), ("qwen2-tied", ("lm_head",))]
)
def test_error_for_a_missing_or_tied_target_module_lists_the_available_names(
    kind: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--ds.lora.target_modules {names[-1]}: .*down_proj, gate"):
        load_causal_lm(
            spec(save_tiny_model(tmp_path, kind), LoraConfig(rank=4, target_modules=names))
        )


def test_adapted_output_layer_matches_plain_transformers_scores(tmp_path: Path) -> None:
    """The test names the output layer, which `all-linear` does not adapt."""
    path = save_tiny_model(tmp_path, "llama")
    hf = moved(
        load_causal_lm(
            spec(path, LoraConfig(rank=4, target_modules=("lm_head", "layers.0.mlp.up_proj")))
        )
    )
    assert sum(hasattr(layer, "lora_A") for layer in hf.modules()) == 2
    scores = PolicyModel(hf, packing=False)(
        TOKENS.flatten(), offsets_of([7, 7]), torch.ones(14, dtype=torch.bool)
    )
    expected = logits(hf)[:, :-1].log_softmax(-1).gather(2, TOKENS[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        scores.logprobs.view(2, 7)[:, 1:].detach(), expected, atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_does_not_change_adapter_gradients(
    reentrant: bool, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path)
    found = []
    for checkpointing in (False, True):
        training = TrainedModelConfig(
            gradient_checkpointing_enable=checkpointing, gradient_checkpointing_reentrant=reentrant
        )
        hf: Any = load_causal_lm(spec(path, training=training)).train()
        hf(TOKENS, use_cache=False).logits.square().mean().backward()
        found.append([p.grad for n, p in hf.named_parameters() if "lora_B" in n])
    for plain, checkpointed in zip(*found, strict=True):
        assert float(plain.abs().max()) > 0
        torch.testing.assert_close(checkpointed, plain)


def test_published_4_bit_weights_equal_the_values_used_in_computation(tmp_path: Path) -> None:
    """The model scores tokens before it trains, as it does in a run.

    On a CPU, bitsandbytes would otherwise pack the weights for kernels without a backward pass.
    """
    path = save_tiny_model(tmp_path, "qwen2-untied", hidden_size=64, intermediate_size=128)
    hf: Any = load_causal_lm(spec(path, param_dtype="bf16", load_in_4bit=True)).eval()
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    exact = logits(plain)
    before = logits(hf)
    moved(hf).train()(TOKENS).logits.float().square().mean().backward()
    assert all(p.grad is not None for p in hf.parameters() if p.requires_grad)
    for each in whole_tensors(hf):
        plain.get_parameter(each.name).data.copy_(each.make())
    torch.testing.assert_close(logits(plain), logits(hf.eval()), atol=0.02, rtol=0)
    with adapters_off(hf):
        assert torch.equal(logits(hf), before)
    assert 0 < float((before - exact).abs().max()) < 0.5  # the rounding error of 4-bit weights


def test_adapters_for_a_model_without_linear_layers_are_rejected(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--ds\.lora\.rank.*gpt2"):
        load_causal_lm(spec(str(tmp_path)))


@pytest.mark.parametrize("modules", [("nosuch",), ("q_proj", "nosuch")])
def test_start_up_check_rejects_unknown_target_modules(
    tmp_path: Path, modules: tuple[str, ...]
) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(UserError, match=r"target_modules nosuch.*q_proj"):
        check_causal_lm(spec(path, LoraConfig(rank=4, target_modules=modules)))
