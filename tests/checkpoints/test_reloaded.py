"""Tests that compare exports with the trained model: good exports pass, and faulty exports fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.checkpoints import export as exporting
from openrlhf.checkpoints.export import ASIDE, ExportError, export_hf
from openrlhf.checkpoints.reloaded import TrainedState, compare_files, compare_reloaded
from openrlhf.config.shared import LoraConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.probe import find_gap, probe_logits
from openrlhf.models.scalar import load_scalar
from openrlhf.training.whole import trained_tensors, whole_tensors
from tests.loading import load_spec
from tests.tiny import character_tokenizer, save_tiny_model

KINDS = ["qwen2-tied", "qwen2-untied", "mixtral", "qwen3-moe"]
LORA = LoraConfig(rank=4, alpha=12)
FORMS = {
    "whole": LoraConfig(),
    "lora": LORA,
    "rslora": LoraConfig(rank=4, alpha=12, rslora=True),
    "dora": LoraConfig(rank=4, alpha=12, dora=True),
}


def trained_model(
    folder: Path, kind: str, form: str, *, scalar: bool = False, dtype: str = "fp32"
) -> Any:
    """Modify the weights of a model that is set up for packed training, and return the model."""
    path = save_tiny_model(folder / "base", kind)
    spec = load_spec(path=path, param_dtype=dtype, attention="sdpa", packing=True, lora=FORMS[form])
    hf: Any = load_scalar(spec, head_prefix="value", seed=1).hf if scalar else load_causal_lm(spec)
    if dtype == "bf16":
        hf.to(torch.bfloat16)  # training also rounds new weights to bfloat16
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.requires_grad:
                moved = parameter.float() + 0.05 * torch.randn(parameter.shape, generator=draw)
                parameter.copy_(moved)
    return hf


def export(
    hf: Any,
    folder: Path,
    *,
    averages: dict[str, Tensor] | None = None,
    dtype: str = "fp32",
    noise: float = 0.0,
    final: bool = True,
) -> None:
    """Export a model with noise added to its logits; `noise` is in units of the logits' std."""
    tensors = (trained_tensors if hasattr(hf, "peft_config") else whole_tensors)(hf)
    logits = None
    if final:
        logits = probe_logits(hf)
        draw = torch.Generator().manual_seed(2)
        logits += noise * logits.std() * torch.randn(logits.shape, generator=draw)
    state = TrainedState(logits=logits, precision=dtype, averages=averages or {})
    buckets = [[(each.name, each.make())] for each in tensors]
    export_hf(
        buckets, hf, character_tokenizer(), str(folder), writes=True, trained=state, final=final
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_exported_language_model_matches_the_trained_model(
    kind: str, form: str, tmp_path: Path
) -> None:
    export(trained_model(tmp_path, kind, form), tmp_path / "out")
    assert not [*(tmp_path / "out").glob(f"{ASIDE}*")]


@pytest.mark.parametrize("form", ["whole", "lora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_scalar_model_matches_the_trained_model(
    form: str, dtype: str, tmp_path: Path
) -> None:
    export(
        trained_model(tmp_path, "qwen2-tied", form, scalar=True, dtype=dtype),
        tmp_path / "out",
        dtype=dtype,
    )


def edit_json(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def edit_weights(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        [file] = folder.glob("*.safetensors")
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})

    return edit


def first(weights: dict[str, Tensor]) -> str:
    return next(name for name in sorted(weights) if "layers.1" in name)


def drop(weights: dict[str, Tensor]) -> None:
    del weights[first(weights)]


def rename(weights: dict[str, Tensor]) -> None:
    weights[f"module.{first(weights)}"] = weights.pop(first(weights))


def nudge(weights: dict[str, Tensor]) -> None:
    """Change the least significant bit of one value."""
    flat = weights[first(weights)].view(torch.int32).view(-1)
    flat[-1] += 1


def undo(weights: dict[str, Tensor]) -> None:
    """Reset the adapter to its initial state."""
    for name in weights:
        if ".lora_B" in name:
            weights[name].zero_()


FAULTS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "dropped": ("qwen2-tied", "whole", edit_weights(drop)),
    "renamed": ("qwen2-untied", "whole", edit_weights(rename)),
    "one bit": ("mixtral", "whole", edit_weights(nudge)),
    "tied by mistake": ("qwen2-untied", "whole",
                        edit_json("config.json", tie_word_embeddings=True)),
    "untied by mistake": ("qwen2-tied", "whole",
                          edit_json("config.json", tie_word_embeddings=False)),
    "other positions": ("qwen2-tied", "whole",
                        edit_json("config.json",
                                  rope_parameters={"rope_type": "default", "rope_theta": 3})),
    "a layer less": ("qwen2-tied", "whole", edit_json("config.json", num_hidden_layers=1)),
    "adapter dropped": ("qwen2-tied", "lora", edit_weights(drop)),
    "adapter renamed": ("qwen2-tied", "lora", edit_weights(rename)),
    "adapter stale": ("qwen2-tied", "lora", edit_weights(undo)),
    "adapter of another scale": ("qwen2-tied", "lora",
                                 edit_json("adapter_config.json", lora_alpha=24)),
    "adapter without the root": ("qwen2-tied", "rslora",
                                 edit_json("adapter_config.json", use_rslora=False)),
    "adapter without magnitudes": ("qwen2-tied", "dora",
                                   edit_json("adapter_config.json", use_dora=False)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files_raise_an_export_error_and_both_models_are_kept(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, form, spoil = FAULTS[fault]
    out = tmp_path / "out"
    save_tiny_model(out)
    before = (out / "model.safetensors").read_bytes()

    def compare_spoiled(folder: Path, *arguments: Any) -> None:
        spoil(folder)
        compare_reloaded(folder, *arguments)

    monkeypatch.setattr(exporting, "compare_reloaded", compare_spoiled)
    with pytest.raises(ExportError) as failed:
        export(trained_model(tmp_path, kind, form), out)
    [aside] = out.glob(f"{ASIDE}*")
    assert str(aside) in str(failed.value) and str(out) in str(failed.value)
    assert [*aside.glob("*.safetensors")] and (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_correct_export_during_a_run_prints_no_notice(
    kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = trained_model(tmp_path, kind, form)
    capsys.readouterr()
    export(hf, tmp_path / "out", final=False)
    assert str(tmp_path / "out") not in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault", ["dropped", "one bit", "adapter dropped", "adapter renamed", "adapter stale"]
)
def test_faulty_export_during_a_run_prints_a_notice(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, form, spoil = FAULTS[fault]

    def compare_spoiled(folder: Path, *arguments: Any) -> None:
        spoil(folder)
        compare_files(folder, *arguments)

    monkeypatch.setattr(exporting, "compare_files", compare_spoiled)
    export(
        trained_model(tmp_path, "qwen2-tied" if fault == "one bit" else kind, form),
        tmp_path / "out",
        final=False,
    )
    assert str(tmp_path / "out") in capsys.readouterr().err
    assert [*(tmp_path / "out").glob("*.safetensors")]


@pytest.mark.parametrize(("noise", "ends"), [(0.01, "well"), (0.4, "notice"), (1.4, "error")])
def test_logit_differences_between_kernels_do_not_fail_an_export(
    noise: float, ends: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = trained_model(tmp_path, "qwen2-untied", "whole", dtype="bf16")
    capsys.readouterr()
    if ends == "error":
        with pytest.raises(ExportError):
            export(hf, tmp_path / "out", dtype="bf16", noise=noise)
        return
    export(hf, tmp_path / "out", dtype="bf16", noise=noise)
    assert (str(tmp_path / "out") in capsys.readouterr().err) == (ends == "notice")


def test_tokens_routed_to_a_different_expert_are_not_mistaken_for_a_different_model() -> None:
    draw = torch.Generator().manual_seed(1)
    expected, other = torch.randn((2, 1, 16, 100), generator=draw)
    found = expected.clone()
    found[:, :3] = other[:, :3]
    rerouted = find_gap(expected, found, torch.float32)
    unrelated = find_gap(expected, other, torch.bfloat16)
    assert rerouted and not rerouted.is_other_model
    assert unrelated and unrelated.is_other_model


def test_rounding_of_nearly_constant_values_is_not_mistaken_for_a_different_model() -> None:
    draw = torch.Generator().manual_seed(1)
    expected = 0.3 + 0.01 * torch.randn(16, generator=draw)
    found = expected + 0.05 * torch.randn(16, generator=draw)
    rounded = find_gap(expected, found, torch.bfloat16)
    negated = find_gap(expected, -expected, torch.bfloat16)
    assert not rounded or not rounded.is_other_model
    assert negated and negated.is_other_model


def test_weights_that_differ_from_the_ema_raise_an_export_error(tmp_path: Path) -> None:
    hf = trained_model(tmp_path, "qwen2-tied", "whole")
    averages = {name: parameter.detach().clone() for name, parameter in hf.named_parameters()}
    export(hf, tmp_path / "out", averages=averages)
    name = next(iter(averages))
    averages[name] += 1e-3
    with pytest.raises(ExportError, match=name):
        export(hf, tmp_path / "out", averages=averages)


def test_model_with_nan_weights_is_exported_unchanged(tmp_path: Path) -> None:
    hf = trained_model(tmp_path, "qwen2-tied", "whole")
    with torch.no_grad():
        next(hf.parameters()).fill_(torch.nan)
    export(hf, tmp_path / "out")


def test_model_too_large_to_reload_is_exported_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openrlhf.checkpoints.reloaded.free_memory", lambda: 10)
    export(trained_model(tmp_path, "qwen2-tied", "whole"), tmp_path / "out")
    assert str(tmp_path / "out") in capsys.readouterr().err


def test_sharded_base_too_large_to_reload_prints_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sharded parameter is an empty placeholder with a `ds_shape`."""
    hf = trained_model(tmp_path, "qwen2-tied", "lora")
    export(hf, tmp_path / "out")
    state = TrainedState(logits=probe_logits(hf), precision="fp32")
    for each in trained_tensors(hf):
        state.add(each.name, each.make())
    size = 0
    for parameter in hf.parameters():
        size += parameter.nbytes
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    monkeypatch.setattr("openrlhf.checkpoints.reloaded.free_memory", lambda: size)
    compare_reloaded(tmp_path / "out", hf, state)
    assert str(tmp_path) in capsys.readouterr().err
