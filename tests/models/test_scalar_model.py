"""Reward models and critics: outputs, exported folders, ZeRO-3 and rejected models.

Outputs are compared with those of plain Transformers, and packed rows are compared with padded
rows.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, CohereConfig

from openrlhf.checkpoints.export import export_hf
from openrlhf.config.shared import TrainedModelConfig
from openrlhf.core.batches import Layout, offsets_of
from openrlhf.models import packed_attention
from openrlhf.models.head import OutputHead
from openrlhf.models.loading import LoadSpec, ModelError, load_causal_lm
from openrlhf.models.scalar import (
    ScalarModel,
    check_is_scalar,
    last_token_scores,
    load_scalar,
    state_values,
)
from tests.loading import load_spec
from tests.ranks import run_ranks
from tests.tiny import character_tokenizer, save_reward_model, save_tiny_model, tiny_config

LENGTHS = [5, 1, 9, 3]
KINDS = ["qwen2-tied", "qwen2-untied", "llama", "mistral-windowed", "qwen3"]


def spec(path: Path | str, **changes: Any) -> LoadSpec:
    settings = {"param_dtype": "fp32", "attention": "sdpa", "packing": False}
    return load_spec(path=str(path), **settings | changes)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 60, (sum(LENGTHS),), generator=generator)
    return tokens, offsets_of(LENGTHS)


def scalar(kind: str = "llama", *, packing: bool = False, **changes: Any) -> ScalarModel:
    """Return a random float64 model without a padding token.

    Transformers would treat a padding token as the end of a text.
    """
    torch.manual_seed(0)
    config = tiny_config(kind, num_labels=1, pad_token_id=None, **changes)
    hf = AutoModelForSequenceClassification.from_config(config).double().eval()
    if packing:
        hf.set_attn_implementation(packed_attention.NAME)
    return ScalarModel(hf, packing=packing)


def export(model: ScalarModel, path: Path) -> str:
    buckets = [[(name, p.data) for name, p in model.hf.named_parameters()]]
    export_hf(buckets, model.hf, character_tokenizer(), str(path), writes=True)
    return str(path)


def head_of(model: ScalarModel) -> Tensor:
    return model.head.layer.weight.detach()


def edit_config(path: str, **entries: Any) -> None:
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


# ---- numbers


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_match_plain_transformers_on_each_sequence_alone(kind: str, packing: bool) -> None:
    tokens, offsets = batch()
    plain = scalar(kind).hf
    with torch.no_grad():
        scores = last_token_scores(scalar(kind, packing=packing)(tokens, offsets).values, offsets)
        expected = [float(plain(ids[None]).logits) for ids in tokens.split(LENGTHS)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-12)
    assert len({round(score, 6) for score in expected}) == len(LENGTHS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_match_transformers_with_padding_on_either_side(side: str) -> None:
    tokens, offsets = batch()
    model = scalar("qwen3")
    model.hf.config.pad_token_id = 0
    layout = Layout.of(offsets)
    ids, mask = layout.pad(tokens), layout.real.long()
    if side == "left":
        for row, length in enumerate(LENGTHS):
            ids[row], mask[row] = ids[row].roll(-length), mask[row].roll(-length)
    with torch.no_grad():
        scores = last_token_scores(model(tokens, offsets).values, offsets)
        expected = model.hf(input_ids=ids, attention_mask=mask).logits[:, 0]
    # Transformers computes rotary angles in float32, and left padding shifts the angles.
    torch.testing.assert_close(scores, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_state_value_is_the_score_of_the_preceding_text(packing: bool) -> None:
    tokens, offsets = batch()
    plain = scalar().hf
    expected = []
    with torch.no_grad():
        values = state_values(scalar(packing=packing)(tokens, offsets).values, offsets)
        for ids in tokens.split(LENGTHS):
            expected.append(0.0)
            expected += [float(plain(ids[None, :t]).logits) for t in range(1, len(ids))]
    assert values.tolist() == pytest.approx(expected, abs=1e-12)


def test_state_values_are_shifted_within_each_sequence() -> None:
    outputs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert state_values(outputs, offsets_of([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 5]
    assert last_token_scores(outputs, offsets_of([3, 1, 2])).tolist() == [3, 4, 6]


def test_packed_and_padded_gradients_match() -> None:
    tokens, offsets = batch()
    gradients = []
    for packing in (False, True):
        model = scalar("qwen2-tied", packing=packing)
        values = model(tokens, offsets).values
        (
            last_token_scores(values, offsets).sum() + state_values(values, offsets).square().sum()
        ).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None and gradient.any() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-12, rtol=1e-9)


def test_reward_depends_only_on_its_sequence() -> None:
    tokens, offsets = batch()
    model = scalar(packing=True)
    embedded: list[Tensor] = []
    layer = model.hf.get_input_embeddings()
    layer.register_forward_hook(lambda _, __, out: (out.retain_grad(), embedded.append(out))[0])
    last_token_scores(model(tokens, offsets).values, offsets)[2].backward()
    reached = embedded[0].grad[0].abs().sum(1) > 0
    assert reached.tolist() == [False] * 6 + [True] * 9 + [False] * 3


def test_precise_head_of_a_bfloat16_model_computes_in_float32() -> None:
    linear = torch.nn.Linear(512, 1, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(3, 512, dtype=torch.bfloat16)
    outputs = OutputHead(linear, precise=True).outputs(hidden)[:, 0]
    expected = hidden.double() @ linear.weight.double()[0]
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs.double(), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="float32"):
        OutputHead(linear, precise=True).reduced(hidden, lambda logits, rows: logits)
    with pytest.raises(AssertionError, match="float32"):
        OutputHead(linear, precise=True).scores(hidden, torch.zeros(3).long())


def test_normalization_subtracts_the_mean_and_divides_by_the_standard_deviation() -> None:
    tokens, offsets = batch()
    model = scalar()
    model.set_scale(2.0, 4.0)
    raw = model(tokens, offsets).values
    model.normalize = True
    torch.testing.assert_close(model(tokens, offsets).values, (raw - 2) / 4)


@pytest.mark.parametrize(
    ("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))]
)
def test_reward_scale_must_be_finite_and_positive(mean: float, std: float) -> None:
    with pytest.raises(ValueError, match=f"mean {mean} and standard deviation {std}"):
        scalar().set_scale(mean, std)


# ---- folders


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_as_a_sequence_classification_model_and_gives_the_same_scores(
    kind: str, tmp_path: Path
) -> None:
    tokens, offsets = batch()
    model = load_scalar(spec(save_tiny_model(tmp_path / "lm", kind)), seed=3)
    path = export(model, tmp_path / "rm")
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        scores = last_token_scores(model(tokens, offsets).values, offsets)
        expected = [float(plain(ids[None]).logits) for ids in tokens.split(LENGTHS)]
    assert plain.config.num_labels == 1
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert scores.abs().max() > 1e-2
    AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_keeps_all_language_model_weights_and_exporting_keeps_the_head(
    kind: str, tmp_path: Path
) -> None:
    first = load_scalar(spec(save_tiny_model(tmp_path / "lm", kind)), seed=3)
    second = load_scalar(spec(export(first, tmp_path / "rm")), seed=4, require_head=True)
    stored = load_file(tmp_path / "lm" / "model.safetensors")
    for name, parameter in second.hf.named_parameters():
        assert torch.equal(parameter, first.hf.get_parameter(name)), name
        assert name == "score.weight" or torch.equal(parameter, stored[name]), name


def test_head_saved_by_plain_transformers_is_loaded(tmp_path: Path) -> None:
    hf = scalar("qwen3").hf.float()
    hf.save_pretrained(tmp_path)
    assert torch.equal(head_of(load_scalar(spec(tmp_path), require_head=True)), hf.score.weight)


def test_new_head_is_initialized_with_standard_deviation_1_over_hidden_size_plus_1(
    tmp_path: Path,
) -> None:
    path = save_tiny_model(tmp_path, hidden_size=1024, num_attention_heads=4)
    weight = head_of(load_scalar(spec(path), seed=1))
    assert weight.shape == (1, 1024)
    assert float(weight.std()) * 1025 == pytest.approx(1.0, abs=0.08)
    assert abs(float(weight.mean())) < 1e-4


def test_new_head_depends_only_on_the_seed(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    heads = []
    for state, seed in ((0, 7), (1, 7), (0, 8)):
        torch.manual_seed(state)
        heads.append(head_of(load_scalar(spec(path), seed=seed)))
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_reinit_head_replaces_a_stored_head_and_resets_its_scale(
    tmp_path: Path,
) -> None:
    model = load_scalar(spec(save_tiny_model(tmp_path / "lm")), seed=3)
    model.set_scale(0.5, 2.0)
    path = export(model, tmp_path / "rm")
    kept, renewed = load_scalar(spec(path)), load_scalar(spec(path), reinit_head=True, seed=4)
    assert torch.equal(head_of(kept), head_of(model))
    assert (kept.mean, kept.std) == (0.5, 2.0)
    assert not torch.equal(head_of(renewed), head_of(model))
    assert (renewed.mean, renewed.std) == (0.0, 1.0)
    again = load_scalar(spec(export(renewed, tmp_path / "again")))
    assert (again.mean, again.std) == (0.0, 1.0)


def test_stored_head_prefix_takes_precedence_over_the_flag(
    tmp_path: Path,
) -> None:
    tokens, offsets = batch()
    model = load_scalar(spec(save_tiny_model(tmp_path / "lm")), head_prefix="value_head", seed=3)
    path = export(model, tmp_path / "rm")
    assert "value_head.weight" in load_file(f"{path}/model.safetensors")
    again = load_scalar(spec(path), head_prefix="score", require_head=True)
    assert again.config.value_head_prefix == "value_head"
    assert torch.equal(head_of(again), head_of(model))
    with torch.no_grad():
        scores = last_token_scores(again(tokens, offsets).values, offsets)
        expected = [float(again.hf(ids[None]).logits) for ids in tokens.split(LENGTHS)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)


def test_reward_model_in_openrlhf_format_can_be_loaded(tmp_path: Path) -> None:
    """OpenRLHF's model class has its own name, no label count, and a head named value_head."""
    path = save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = torch.full((1, 32), 0.25)
    save_file(
        weights | {"value_head.weight": head},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    edit_config(
        path, architectures=["RewardModel"], value_head_prefix="value_head", mean=1.5, std=0.5
    )
    model = load_scalar(spec(path), require_head=True)
    assert torch.equal(head_of(model), head)
    assert (model.mean, model.std) == (1.5, 0.5)


def test_exported_model_scores_end_of_text_even_if_it_is_the_padding_token(
    tmp_path: Path,
) -> None:
    model = load_scalar(spec(save_tiny_model(tmp_path / "lm", pad_token_id=1)), seed=3)
    plain = AutoModelForSequenceClassification.from_pretrained(export(model, tmp_path / "rm"))
    tokens = torch.tensor([10, 20, 30, 1])  # ends with end-of-text
    with torch.no_grad():
        score = float(last_token_scores(model(tokens, offsets_of([4])).values, offsets_of([4])))
        assert float(plain.eval()(tokens[None]).logits) == pytest.approx(score, abs=1e-6)


def test_packing_and_dtype_are_set_by_flags(tmp_path: Path) -> None:
    model = load_scalar(spec(save_tiny_model(tmp_path), packing=True, param_dtype="bf16"))
    assert model.packing
    assert {p.dtype for p in model.hf.get_decoder().parameters()} == {torch.bfloat16}
    # The training engine rounds a new head but also keeps the head's exact values.
    assert head_of(model).dtype == torch.float32
    tokens, offsets = batch()
    values = model(tokens, offsets).values
    assert values.dtype == torch.float32 and values.isfinite().all()


def test_gradient_checkpointing_does_not_change_gradients(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    tokens, offsets = batch()
    gradients = []
    for checkpointing in (False, True):
        training = TrainedModelConfig(gradient_checkpointing_enable=checkpointing)
        model = load_scalar(spec(path, training=training), seed=3).train()
        model(tokens, offsets).values.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_deep_copy_has_a_separate_head() -> None:
    model = scalar()
    twin = copy.deepcopy(model)
    twin.head.layer.weight.data.zero_()
    assert twin.hf.get_submodule("score") is twin.head.layer
    assert head_of(model).any()


# ---- sharded


def test_zero_3_gives_the_same_results_for_new_and_stored_heads(tmp_path: Path) -> None:
    new = save_tiny_model(tmp_path / "lm")
    stored = export(load_scalar(spec(new), head_prefix="value_head", seed=3), tmp_path / "rm")
    run_ranks(2, "tests.models.scalar_job", str(tmp_path / "out"), new, stored, timeout=400)
    results = torch.load(tmp_path / "out")
    tokens, offsets = batch()
    for path in (new, stored):
        whole, sharded = results[path, 2], results[path, 3]
        alone = load_scalar(spec(path), seed=5)(tokens, offsets).values.detach()
        for before in (whole["before"], sharded["before"], sharded["frozen"]):
            torch.testing.assert_close(before, alone, atol=1e-6, rtol=0)
        torch.testing.assert_close(sharded["after"], whole["after"], atol=1e-6, rtol=0)
        assert (sharded["after"] - alone).abs().max() > 1e-3
        exported = load_scalar(spec(sharded["export"]), require_head=True)(tokens, offsets).values
        torch.testing.assert_close(exported.detach(), sharded["after"], atol=1e-6, rtol=0)


# ---- refusals


def test_language_model_is_rejected_as_a_reward_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(
        ValueError, match=r"is not a reward model.*score\.weight, is missing.*lm_head\.weight"
    ):
        load_scalar(spec(path), require_head=True)


def test_stored_head_with_a_different_name_is_reported(tmp_path: Path) -> None:
    scalar("qwen3").hf.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"value_head\.weight, is missing.*score\.weight.*--ds\.value_head_prefix"
    ):
        load_scalar(spec(tmp_path), head_prefix="value_head")


def test_multiclass_classifier_is_rejected_unless_the_head_is_reinitialized(
    tmp_path: Path,
) -> None:
    config = tiny_config("llama", num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"score\.weight, has size \(3, 32\) instead of one output"
    ):
        load_scalar(spec(tmp_path))
    assert head_of(load_scalar(spec(tmp_path), reinit_head=True)).shape == (1, 32)


def test_missing_weight_raises_an_error_that_names_it(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 weights are missing from the files: model\.norm\.weight"
    ):
        load_scalar(spec(path))


def test_error_for_an_architecture_without_a_plain_head_names_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    CohereConfig(**sizes).save_pretrained(tmp_path / "without")
    bert = BertConfig(**sizes, intermediate_size=64)
    AutoModelForSequenceClassification.from_config(bert).save_pretrained(tmp_path / "with bias")
    for folder, name in (("without", "cohere"), ("with bias", "bert")):
        with pytest.raises(
            ValueError, match=f"'{name}' cannot be used.*none with a plain linear head"
        ):
            load_scalar(spec(tmp_path / folder))


@pytest.mark.parametrize("name", ["model", "forward", "two words", "a.b"])
def test_head_prefix_that_is_taken_or_invalid_is_rejected(name: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be called .*--ds\.value_head_prefix"):
        load_scalar(spec(path), head_prefix=name)


@pytest.mark.parametrize("ending", ["", "/"])
def test_export_replaces_only_the_model_in_a_folder(tmp_path: Path, ending: str) -> None:
    folder = tmp_path / "ckpt"
    kept = folder / "checkpoints_rm" / "global_step20" / "state"
    kept.parent.mkdir(parents=True)
    kept.write_text("hours of work")
    (folder / "model-00002-of-00002.safetensors").write_text("a shard of a previous, larger model")
    model = load_scalar(spec(save_tiny_model(tmp_path / "lm")), seed=3)
    for _ in range(2):
        export_hf(
            [list(model.hf.named_parameters())],
            model.hf,
            character_tokenizer(),
            f"{folder}{ending}",
            writes=True,
        )
    assert kept.read_text() == "hours of work"
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ckpt")] == ["ckpt"]
    AutoModelForSequenceClassification.from_pretrained(folder)


def test_normalize_without_a_stored_mean_and_standard_deviation_is_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export(load_scalar(spec(save_tiny_model(tmp_path / "lm")), seed=3), tmp_path / "rm")
    check_is_scalar(spec(path), normalize=True)
    assert f"--reward.normalize_enable changes nothing for {path}" in capsys.readouterr().err


def test_configuration_distinguishes_language_model_from_reward_model(tmp_path: Path) -> None:
    language_model = spec(save_tiny_model(tmp_path / "lm"))
    with pytest.raises(ModelError, match=r"is a language model \(Qwen2ForCausalLM\)"):
        check_is_scalar(language_model)
    reward_model = spec(save_reward_model(tmp_path / "rm", tmp_path / "lm"))
    check_is_scalar(reward_model)
    with pytest.raises(
        ModelError, match=r"is a reward model or critic \(Qwen2ForSequenceClassification\)"
    ):
        load_causal_lm(reward_model)
