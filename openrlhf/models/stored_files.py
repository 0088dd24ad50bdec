"""Writes model and generation configurations that Transformers refuses to write.

Transformers refuses to write some values that it can read: sampling values without `do_sample`, or
generation values in config.json. A run must not lose its weights because of such a refusal, so the
files are written with the original values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from openrlhf.checks import Finding
from openrlhf.config.flags import UserError

GENERATION = "generation_config.json"


@contextmanager
def writable_configuration(config: PreTrainedConfig) -> Iterator[None]:
    """Remove generation settings from `config` until the block exits.

    A loaded model also has these settings in its generation configuration.
    """
    values: dict[str, Any] = config._get_generation_parameters()
    stored = vars(config)
    moved = {name: stored.pop(name) for name in values if name in stored}
    try:
        yield
    finally:
        stored.update(moved)


@contextmanager
def writable(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's `save_pretrained` accept its configuration until the block exits.

    An empty generation configuration replaces the original, which is written by `write_generation`.
    """
    generation = getattr(model, "generation_config", None)
    if generation:
        model.generation_config = GenerationConfig()
    try:
        with writable_configuration(model.config):
            yield
    finally:
        if generation:
            model.generation_config = generation


def write_generation(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's generation configuration with its original values to `folder`."""
    if model.can_generate():
        generation: Any = model.generation_config
        generation.to_json_file(folder / GENERATION, use_diff=True, keys_to_pop=["compile_config"])


def generation_complaint(path: str, config: PreTrainedConfig) -> str | None:
    """Return Transformers' error about a model's generation configuration, or None.

    Without a generation_config.json, the values are read from config.json.
    """
    try:
        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
        generation.validate(strict=True)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None


def check_can_be_exported(
    path: str, tokenizer: Any, *, trust_remote_code: bool = False
) -> list[Finding]:
    """Write a model's configuration and tokenizer to a temporary folder, as an export would.

    Returns warnings. Raises UserError if the configuration or the tokenizer cannot be written.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with TemporaryDirectory() as folder:
        try:
            with writable_configuration(config):
                config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except Exception as error:
            # Transformers, its validation code and the model's own code raise many types of errors.
            raise UserError(
                f"The files of {path} can be read but not written, so a trained model could not be "
                f"exported: {type(error).__name__}: {error}. Correct its config.json or its "
                "tokenizer's files."
            ) from error
    complaint = generation_complaint(path, config)
    if not complaint:
        return []
    seen = (
        f"The generation configuration of {path} is inconsistent and is exported unchanged: "
        f"{complaint}"
    )
    fix = f"Correct the model's {GENERATION} (or config.json, if it contains these values)."
    return [Finding(seen, fix)]
