"""The check that loaded weights exist, have the right size, are finite, and are all used.

Every command that loads a model runs this check.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.cli import main
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.options import parse_config
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig, TrainedModelConfig
from openrlhf.evaluation import batch_inference, chat, runs
from openrlhf.launch import offline, start
from openrlhf.models.loading import ModelError, check_causal_lm, explaining_failures, load_causal_lm
from openrlhf.models.scalar import check_is_scalar, check_scalar_weights, load_scalar
from openrlhf.models.weights import StoredWeights, require_finite_files
from tests.config.commands import SMALLEST
from tests.loading import load_spec
from tests.tiny import character_tokenizer, save_reward_model, save_tiny_model

Weights = dict[str, Tensor]
DOWN, QUERY = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def without_one(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if name != DOWN}


def prefixed(weights: Weights) -> Weights:
    return {f"module.{name}": weight for name, weight in weights.items()}


def with_base_layer(weights: Weights) -> Weights:
    return {
        name.replace("q_proj.weight", "q_proj.base_layer.weight"): weight
        for name, weight in weights.items()
    }


def with_another_size(weights: Weights) -> Weights:
    return weights | {DOWN: torch.ones(32, 65)}


def with_another_bias(weights: Weights) -> Weights:
    return weights | {"model.layers.0.mlp.up_proj.bias": torch.ones(64)}


def with_nan(weights: Weights) -> Weights:
    weights[DOWN][3, 4] = torch.nan
    return weights


def with_infinity(weights: Weights) -> Weights:
    # The startup layout check does not use this token.
    weights["model.embed_tokens.weight"][63, 0] = torch.inf
    return weights


NAMES: dict[Callable[[Weights], Weights], list[str]] = {
    without_one: [DOWN],
    prefixed: ["model.embed_tokens.weight", "module.model."],
    with_base_layer: [QUERY, "q_proj.base_layer.weight"],
    with_another_size: [DOWN, "32 × 65", "32 × 64", "model.safetensors"],
    with_another_bias: ["model.layers.0.mlp.up_proj.bias", "model.safetensors"],
}
NUMBERS = {with_nan: DOWN, with_infinity: "model.embed_tokens.weight"}


def rewrite(folder: Path | str, change: Callable[[Weights], Weights]) -> Path:
    """Change the weights in a model folder."""
    file = Path(folder) / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return Path(folder)


def set_configuration(folder: Path, **entries: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize("change", NAMES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["qwen2-tied", "llama"])
def test_error_names_weights_that_do_not_match_the_architecture(
    kind: str, change: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    folder = rewrite(save_tiny_model(tmp_path / "lm", kind), change)
    scalar = rewrite(
        save_reward_model(tmp_path / "rm", Path(save_tiny_model(tmp_path / "base", kind))), change
    )
    for path, read in (
        (folder, check_causal_lm),
        (folder, load_causal_lm),
        (folder, check_scalar_weights),
        (scalar, check_is_scalar),
        (scalar, load_scalar),
    ):
        with pytest.raises(ModelError) as refused:
            read(load_spec(path))
        assert all(word in str(refused.value) for word in [str(path), *NAMES[change]])


@pytest.mark.parametrize(
    ("error", "advice"),
    [(ImportError("needs the package timm"), False), (TypeError("unknown argument"), True)],
)
def test_error_advises_a_new_download_only_if_the_models_files_are_at_fault(
    error: Exception, advice: bool, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as raised, explaining_failures(load_spec(tmp_path)):
        raise error
    assert str(tmp_path) in str(raised.value) and str(error) in str(raised.value)
    assert ("Download" in str(raised.value)) == advice


def test_lack_of_memory_is_not_reported_as_a_damaged_model(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), explaining_failures(load_spec(tmp_path)):
        raise MemoryError


@pytest.mark.parametrize("change", NUMBERS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_loading_nonfinite_weights_raises_an_error_that_names_them(
    param_dtype: str, change: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    folder = rewrite(save_tiny_model(tmp_path / "lm"), change)
    for read in (load_causal_lm, load_scalar):
        with pytest.raises(ModelError) as refused:
            read(load_spec(folder, param_dtype=param_dtype))
        assert NUMBERS[change] in str(refused.value)


@pytest.mark.parametrize("file", ["model-q4.gguf", "consolidated.safetensors"])
def test_error_for_a_model_in_a_different_format_lists_its_file_names(
    file: str, tmp_path: Path
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ModelError, match=file):
        check_causal_lm(load_spec(tmp_path))


@pytest.mark.parametrize("change", NUMBERS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_error_names_nonfinite_safetensors_weights(
    dtype: torch.dtype, change: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path / "lm"))

    def stored_as(weights: Weights) -> Weights:
        return {name: weight.to(dtype) for name, weight in weights.items()}

    require_finite_files(str(rewrite(folder, stored_as)))
    rewrite(
        folder,
        lambda weights: stored_as(
            change({name: weight.float() for name, weight in weights.items()})
        ),
    )
    with pytest.raises(ModelError) as refused:
        require_finite_files(str(folder))
    assert NUMBERS[change] in str(refused.value) and "model.safetensors" in str(refused.value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("change", NUMBERS)
def test_error_names_nonfinite_torch_weights(
    change: Callable[[Weights], Weights], zipped: bool, tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path / "lm"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    def save(each: Weights) -> None:
        torch.save(each, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)

    save(weights)
    require_finite_files(str(folder))
    save(change(weights))
    with pytest.raises(ModelError) as refused:
        require_finite_files(str(folder))
    assert NUMBERS[change] in str(refused.value) and "pytorch_model.bin" in str(refused.value)


def test_error_for_nonfinite_weights_of_a_hub_model_names_the_cached_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewrite(save_tiny_model(tmp_path / "cache"), with_nan)
    monkeypatch.setattr("openrlhf.models.weights.snapshot_download", lambda name, **_: str(folder))
    with pytest.raises(ModelError, match=str(Path(folder) / "model.safetensors")):
        require_finite_files("lab/model")


def test_engine_does_not_start_for_a_nonfinite_model(tmp_path: Path) -> None:
    folder = rewrite(save_tiny_model(tmp_path / "lm"), with_nan)
    config = parse_config(EvaluationConfig, [*SMALLEST["eval"].split()], command="eval")
    tokenizer, refused = character_tokenizer(), pytest.raises(ModelError, match=re.escape(DOWN))
    recorder: Any = SimpleNamespace(
        folder=SimpleNamespace(logs=tmp_path),
        display=SimpleNamespace(status=print, note=print),
    )
    with refused, runs.engines(config, str(folder), tokenizer, name="vllm", recorder=recorder):
        pytest.fail("an engine was started")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_error_for_an_expert_with_a_different_size_names_its_file_and_both_sizes(
    kind: str, tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path, kind))
    name = sorted(
        name for name in load_file(folder / "model.safetensors") if ".experts.3." in name
    )[0]
    rows, columns = load_file(folder / "model.safetensors")[name].shape

    def widened(weights: Weights) -> Weights:
        return weights | {name: torch.ones(rows + 1, columns)}

    rewrite(folder, widened)
    for read in (check_causal_lm, load_causal_lm):
        with pytest.raises(ModelError) as refused:
            read(load_spec(folder))
        for words in (name, f"{rows + 1} × {columns}", f"{rows} × {columns}", "model.safetensors"):
            assert words in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "has_experts"), [("mixtral", True), ("qwen3-moe", True), ("qwen2-tied", False)]
)
def test_adapters_on_a_mixture_of_experts_print_a_notice(
    kind: str, has_experts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path, kind)
    check_causal_lm(load_spec(folder))
    assert "--ds.lora.rank" not in capsys.readouterr().err
    for check in (check_causal_lm, check_scalar_weights):
        check(load_spec(folder, lora=LoraConfig(rank=4)))
        assert ("--ds.lora.rank" in capsys.readouterr().err) == has_experts


def test_untied_model_without_an_output_layer_is_rejected(tmp_path: Path) -> None:
    folder = Path(save_tiny_model(tmp_path, "qwen2-tied"))
    set_configuration(folder, tie_word_embeddings=False)
    for read in (check_causal_lm, load_causal_lm):
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            read(load_spec(folder))
    load_scalar(load_spec(folder))  # the model has a scalar head instead of an output layer


def with_output_layer(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 0.01}


def with_equal_output_layer(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


def test_tied_model_with_two_different_stored_tensors_is_rejected(tmp_path: Path) -> None:
    folder = rewrite(save_tiny_model(tmp_path, "qwen2-tied"), with_output_layer)
    for load in (load_causal_lm, check_causal_lm):
        with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
            load(load_spec(path=str(folder)))
    load_scalar(load_spec(path=str(folder)))  # the model has no output layer
    set_configuration(folder, tie_word_embeddings=False)
    load_causal_lm(load_spec(path=str(folder)))
    check_causal_lm(load_spec(path=str(folder)))


def test_tied_model_with_two_equal_stored_tensors_is_loaded(tmp_path: Path) -> None:
    folder = rewrite(save_tiny_model(tmp_path, "qwen2-tied"), with_equal_output_layer)
    for load in (load_causal_lm, check_causal_lm):
        load(load_spec(path=str(folder)))


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_separately_stored_tied_weights_are_reported_only_if_they_differ(
    equal: bool, partitioned: bool, tmp_path: Path
) -> None:
    change = with_equal_output_layer if equal else with_output_layer
    folder = rewrite(save_tiny_model(tmp_path, "qwen2-tied"), change)
    hf = AutoModelForCausalLM.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    hf.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])
    hf.model.embed_tokens.weight = torch.nn.Parameter(weights["model.embed_tokens.weight"])
    if partitioned:  # each process holds an empty placeholder for the weight
        for weight in (hf.lm_head.weight, hf.model.embed_tokens.weight):
            weight.ds_tensor = weight.detach()
            weight.data = torch.empty(0)
    else:  # Transformers may have renamed the stored weights
        rewrite(folder, lambda stored: {f"old.{name}": stored[name] for name in stored})
    nothing = {key: set[str]() for key in ("unexpected_keys", "mismatched_keys", "missing_keys")}
    found = StoredWeights.of(str(folder), hf, nothing)
    assert bool(found.broken_ties) == (not equal)


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied", "qwen3-moe"])
def test_model_that_lacks_any_single_weight_is_rejected(kind: str, tmp_path: Path) -> None:
    folder = Path(save_tiny_model(tmp_path / "whole", kind, num_hidden_layers=1))
    check_causal_lm(load_spec(folder))
    names = sorted(load_file(folder / "model.safetensors"))
    for number, lost in enumerate(names):
        broken = tmp_path / str(number)
        shutil.copytree(folder, broken)
        rewrite(
            broken,
            lambda weights, lost=lost: {name: weights[name] for name in weights if name != lost},
        )
        with pytest.raises(ModelError):
            check_causal_lm(load_spec(broken))


def test_error_for_a_wrongly_sized_weight_in_a_sharded_model_names_its_file(tmp_path: Path) -> None:
    folder = Path(save_tiny_model(tmp_path / "whole"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    index = json.loads((tmp_path / "cut/model.safetensors.index.json").read_text())
    file = tmp_path / "cut" / index["weight_map"][DOWN]
    save_file(with_another_size(load_file(file)), file, {"format": "pt"})
    with pytest.raises(ModelError, match=file.name):
        load_causal_lm(load_spec(tmp_path / "cut"))


def test_head_with_a_bias_is_rejected_unless_the_head_is_reinitialized(tmp_path: Path) -> None:
    base = Path(save_tiny_model(tmp_path / "base"))
    spec = load_spec(
        rewrite(
            save_reward_model(tmp_path / "rm", base), lambda w: w | {"score.bias": torch.ones(1)}
        )
    )
    for read in (check_is_scalar, check_scalar_weights, load_scalar):
        with pytest.raises(ModelError, match=r"score\.bias"):
            read(spec)
    check_scalar_weights(spec, reinit_head=True)
    load_scalar(spec, reinit_head=True)


def test_unused_weights_print_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rewrite(
        save_tiny_model(tmp_path), lambda w: w | {"model.mtp.proj.weight": torch.ones(2, 2)}
    )
    check_causal_lm(load_spec(folder))
    assert "model.mtp.proj.weight" in capsys.readouterr().err
    load_causal_lm(load_spec(folder))


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": 1},
        {"layer_types": ["full_attention"]},
        {"num_attention_heads": 0},
        {"vocab_size": 70},
    ],
    ids=str,
)
def test_configuration_that_contradicts_itself_or_the_weights_is_rejected(
    entries: dict[str, object], tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path))
    set_configuration(folder, **entries)
    with pytest.raises(ModelError, match=str(folder)):
        check_causal_lm(load_spec(folder))


# A command imports these functions before PEFT, but other tests may already have imported PEFT.
# The functions are therefore imported at the top of this file.
RUNNERS = (
    batch_inference.run_batch_inference,
    chat.run_chat,
    runs.run_evaluation,
    offline.run_offline,
    start.run_ppo,
)
COMMANDS = {
    "sft": "--model.model_name_or_path {lm} --data.dataset {rows}",
    "kto": "--model.model_name_or_path {lm} --data.dataset {rows}",
    "dpo": "--model.model_name_or_path {whole} --ref.model_name_or_path {lm} --data.dataset {rows}",
    "kd": "--model.model_name_or_path {whole} --kd.teacher_model {lm} --data.dataset {rows}",
    "prm": (
        "--model.model_name_or_path {lm} --data.dataset {rows} --prm.placeholder_token ? "
        "--prm.reward_tokens + -"
    ),
    "rm": "--model.model_name_or_path {rm} --data.dataset {rows}",
    "ppo": (
        "--actor.model_name_or_path {lm} --data.prompt_dataset {rows} --reward.remote_url r.py "
        "--dry_run"
    ),
    "eval": (
        "--model.model_name_or_path {lm} --eval.dataset {rows} --reward.remote_url r.py --dry_run"
    ),
    "batch_inference": (
        "--model.model_name_or_path {lm} --data.dataset {rows} --output_path {out} --dry_run"
    ),
    "interactive_chat": "--model.model_name_or_path {lm}",
    "serve_rm": "--reward.model_name_or_path {rm}",
    "lora_combiner": "--model_path {lm} --lora_path {whole} --output_path {out}",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_rejects_an_incomplete_model_before_starting_a_process(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = save_tiny_model(tmp_path / "whole")
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "output": "b"}\n')
    (tmp_path / "r.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n"
    )
    folders = {
        "whole": whole,
        "lm": str(rewrite(save_tiny_model(tmp_path / "lm"), without_one)),
        "rm": str(rewrite(save_reward_model(tmp_path / "rm", Path(whole)), without_one)),
        "rows": "rows.jsonl",
        "out": "out",
    }
    with pytest.raises(SystemExit) as ended:
        main.main([command, *COMMANDS[command].format(**folders).split()])
    assert ended.value.code
    assert DOWN in capsys.readouterr().err


def test_matching_model_prints_no_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path, "qwen2-untied")
    check_causal_lm(load_spec(folder))
    check_scalar_weights(load_spec(folder))  # a reward model, whose head replaces the output layer
    assert capsys.readouterr().err == ""
    assert AutoConfig.from_pretrained(folder).tie_word_embeddings is False


@pytest.mark.parametrize(
    ("stored", "advice"),
    [
        ({"quant_method": "fp8"}, "Use the unquantized model"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "--ds.load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "Use the unquantized model"),
    ],
)
def test_quantized_model_is_rejected_with_the_method_and_what_works(
    tmp_path: Path, stored: dict[str, object], advice: str
) -> None:
    save_tiny_model(tmp_path, "llama")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": stored}))
    spec = load_spec(tmp_path)
    expected = rf"quantized \({stored['quant_method']}\).*{advice}"
    with pytest.raises(ModelError, match=expected):
        load_causal_lm(spec)
    check_causal_lm(spec)  # an engine may serve the model
    with pytest.raises(ModelError, match=expected):
        check_causal_lm(replace(spec, ds=DeepSpeedConfig()))


@pytest.mark.parametrize(("kind", "balances"), [("llama", False), ("qwen3-moe", True)])
def test_start_up_check_requires_experts_for_the_balancing_loss(
    tmp_path: Path, kind: str, balances: bool
) -> None:
    training = TrainedModelConfig(aux_loss_coef=0.1)
    spec = load_spec(save_tiny_model(tmp_path, kind), training=training)
    if balances:
        check_causal_lm(spec)
        return
    with pytest.raises(ModelError, match=r"--model\.aux_loss_coef"):
        check_causal_lm(spec)
