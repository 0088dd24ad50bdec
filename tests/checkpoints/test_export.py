"""Exports preserve the original model's settings and never lose a model."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig

from openrlhf.checkpoints.combine import combine
from openrlhf.checkpoints.export import (
    ASIDE,
    ExportError,
    UnwritableError,
    check_disk_room,
    export_hf,
    replacing,
)
from openrlhf.checkpoints.manifest import CheckpointError
from openrlhf.config.combining import CombinerConfig
from openrlhf.config.flags import UserError
from openrlhf.models.stored_files import check_can_be_exported
from tests.checkpoints.kept import checkpoints_in
from tests.tiny import character_tokenizer, save_tiny_model

# Contradictory values from published models' generation_config.json or config.json.
CONTRADICTIONS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.1},
    {"early_stopping": True},
    {"length_penalty": 0.5},
    {"pad_token_id": -1},
    {"output_scores": True},
]
IN_CONFIG: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"top_p": 0.5, "do_sample": True},
    {"num_beams": 4},
]


def model_with(
    folder: Path, generation: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """Save a tiny model with these values in generation_config.json or config.json."""
    save_tiny_model(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1} | generation))
    if config is not None:
        (folder / "generation_config.json").unlink()
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stored | config))
    return folder


def export(source: Path, target: Path, tokenizer: Any = None) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    buckets = [[(name, parameter.detach()) for name, parameter in model.named_parameters()]]
    export_hf(buckets, model, tokenizer or character_tokenizer(), str(target), writes=True)


CASES = [(each, None) for each in CONTRADICTIONS] + [(None, each) for each in IN_CONFIG]


@pytest.mark.parametrize(("generation", "config"), CASES, ids=str)
def test_export_keeps_generation_settings_that_transformers_refuses_to_write(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None
) -> None:
    source = model_with(tmp_path / "base", generation, config)
    if generation:
        notice = str(*check_can_be_exported(str(source), character_tokenizer()))
        assert str(source) in notice and next(iter(generation)) in notice
    else:
        check_can_be_exported(str(source), character_tokenizer())
    export(source, tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(source)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in (generation or config or {}).items():
        assert (
            getattr(after.generation_config, name)
            == getattr(before.generation_config, name)
            == value
        )
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])


def test_generation_settings_that_transformers_cannot_load_are_reported(tmp_path: Path) -> None:
    source = model_with(tmp_path / "base", {"num_return_sequences": 3})
    notice = str(*check_can_be_exported(str(source), character_tokenizer()))
    assert "num_return_sequences" in notice


@pytest.mark.parametrize("values", [(CONTRADICTIONS[0], None), (None, IN_CONFIG[0])], ids=str)
def test_adapter_merges_into_a_model_with_contradictory_generation_settings(
    tmp_path: Path, values: Any
) -> None:
    base = model_with(tmp_path / "base", *values)
    adapted: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"])
    )
    adapted.save_pretrained(tmp_path / "adapter")
    combine(
        CombinerConfig(
            model_path=str(base),
            lora_path=str(tmp_path / "adapter"),
            output_path=str(tmp_path / "merged"),
        )
    )
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generation_config.temperature
        == 0.9
    )


def test_consistent_generation_config_is_written_as_transformers_would_write_it(
    tmp_path: Path,
) -> None:
    source = model_with(tmp_path / "base")
    assert check_can_be_exported(str(source), character_tokenizer()) == []
    export(source, tmp_path / "out")
    GenerationConfig.from_pretrained(source).save_pretrained(tmp_path / "plain")
    written, plain = (
        json.loads((tmp_path / name / "generation_config.json").read_text())
        for name in ("out", "plain")
    )
    assert written == plain


class Unwritable:
    """A tokenizer whose files can be read but not written."""

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("no")


def test_model_with_an_unwritable_tokenizer_is_rejected_at_startup(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path / "base")):
        check_can_be_exported(str(model_with(tmp_path / "base")), Unwritable())


def test_failed_export_keeps_the_new_weights_and_the_old_model(
    tmp_path: Path,
) -> None:
    source, old = model_with(tmp_path / "base"), model_with(tmp_path / "old")
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    with pytest.raises(ExportError) as failed:
        export(source, old, Unwritable())
    (aside,) = old.glob(f"{ASIDE}*")
    assert str(aside) in str(failed.value)
    assert (aside / "model.safetensors").stat().st_size == (
        source / "model.safetensors"
    ).stat().st_size
    assert {file.name: file.read_bytes() for file in old.iterdir() if file.is_file()} == before
    export(source, old)
    assert not list(old.glob(f"{ASIDE}*"))


def test_export_replaces_the_files_of_the_old_model_but_no_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "additional_chat_templates").mkdir(parents=True)
    old = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_config.json",
        "vocab.json",
    ]
    for name in [*old, "notes.txt", "tokenizer_notes.txt", "rows.safetensors"]:
        (out / name).write_text("old")
    (out / "config.json").symlink_to(tmp_path / "linked")
    (tmp_path / "linked").write_text("of another model")
    export(model_with(tmp_path / "base"), out)
    assert {file.name for file in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "notes.txt", "tokenizer_notes.txt", "rows.safetensors",
    }  # fmt: skip
    assert (tmp_path / "linked").read_text() == "of another model", (
        "a symlink is replaced, not followed"
    )


def test_old_model_is_kept_until_the_new_model_is_complete(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("old")
    with replacing(tmp_path) as aside:
        (aside / "config.json").write_text("new")
        assert (tmp_path / "config.json").read_text() == "old"
    assert (tmp_path / "config.json").read_text() == "new"


def test_export_does_not_write_outside_its_folder(tmp_path: Path) -> None:
    """The export folder may be a mount point in a parent folder that the user cannot write to."""
    out = tmp_path / "mount"
    out.mkdir()
    with replacing(out) as aside:
        assert [path.name for path in tmp_path.iterdir()] == ["mount"]
        assert aside.is_relative_to(out)


def test_too_little_disk_space_for_the_model_is_an_error_at_startup(tmp_path: Path) -> None:
    assert check_disk_room(str(tmp_path / "not" / "there"), 1) == []
    [finding] = check_disk_room(str(tmp_path), 10**18)
    assert finding.fails and "--ckpt.output_dir" in str(finding)


def write_text(folder: Path) -> None:
    (folder / "text").write_text("x" * 100_000)


def write_tensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(100_000)}, folder / "model.safetensors")


def write_tokenizer(folder: Path) -> None:
    vocabulary = {f"{'word' * 10}{number}": number for number in range(2000)}
    Tokenizer(WordLevel(vocabulary, unk_token="word")).save(str(folder / "tokenizer.json"))


def write_torch(folder: Path) -> None:
    torch.save({"weight": torch.zeros(100_000)}, folder / "model.pt")


@contextmanager
def small_files() -> Iterator[None]:
    """Limit the size of each file that the process writes, as a quota would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("write", [write_text, write_tensors, write_tokenizer])
def test_export_over_quota_raises_a_checkpoint_error(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    manager = checkpoints_in(tmp_path)
    staged = manager.begin(2, hf=True)
    with (
        pytest.raises(CheckpointError),
        manager.writing(staged),
        small_files(),
        replacing(Path(staged.hf_dir)) as aside,
    ):
        write(aside)


def test_export_that_fails_for_another_reason_raises_no_checkpoint_error(
    tmp_path: Path,
) -> None:
    manager = checkpoints_in(tmp_path)
    staged = manager.begin(2, hf=True)
    with pytest.raises(ExportError), manager.writing(staged), replacing(Path(staged.hf_dir)):
        raise ValueError("a defect")


def test_engine_files_over_quota_raise_a_checkpoint_error(
    tmp_path: Path,
) -> None:
    manager = checkpoints_in(tmp_path)
    staged = manager.begin(2)
    with pytest.raises(CheckpointError), manager.writing(staged), small_files():
        write_torch(Path(staged.directory))
    assert not staged.directory.exists()  # the freed space is needed for the final model


def test_unwritable_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(UnwritableError("a.safetensors")))
    assert isinstance(error, UnwritableError) and isinstance(error, OSError)
    assert "a.safetensors" in str(error)
