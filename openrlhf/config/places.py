"""Outputs of a command, and the check that they do not overwrite its inputs.

A flag's `writes` field is the kind of output in its folder or file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import Flag, dataset_parts, flags_in, items

# For each kind of output, the names in its folder that the command writes, replaces or moves.
OWNED = {
    "model": (
        "config.json",
        "generation_config.json",
        "model*.safetensors*",
        "pytorch_model*.bin*",
        "adapter_*",
        "tokenizer.*",
        "tokenizer_config.json",
        "vocab.*",
        "merges.txt",
        "spiece.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.*",
        "additional_chat_templates",
    ),
    "checkpoints": ("*",),
    "episodes": ("step-*.jsonl.gz", "eval-*.jsonl.gz"),
    "run": (
        "config.yaml",
        "config_resolved.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "notices.jsonl",
        "texts.txt",
        "plan.txt",
        "report.html",
        "logs",
        "wandb_id",
        "wandb",
        "earlier",
    ),
    "stages": (),  # stages are listed in the pipeline's YAML file
    "events": (),  # TensorBoard only adds files to the folder
}
# Suffixes of the files that belong to an output file.
FILE_SUFFIXES = ("", ".part", ".request", ".new")


@dataclass(frozen=True, kw_only=True)
class Output:
    """A folder or file that a command writes. `named` is the flag and its value as typed."""

    named: str
    path: str
    kind: str

    @property
    def is_file(self) -> bool:
        """True if the output is a file."""
        return self.kind == "file"

    def changes(self, path: str) -> bool:
        """Return whether the command would write, replace or move the file or folder at `path`."""
        read = Path(path).resolve()
        real = Path(self.path).resolve()
        if self.is_file:
            return str(read) in [f"{real}{suffix}" for suffix in FILE_SUFFIXES]
        if read == real:
            return self.kind in ("model", "checkpoints", "episodes")
        if not read.is_relative_to(real):
            return False
        name = read.relative_to(real).parts[0]
        return any(fnmatch(name, pattern) for pattern in OWNED[self.kind])

    def lies_in(self, folder: str) -> bool:
        """Return whether the output is this data folder or lies inside it."""
        return os.path.isdir(folder) and Path(self.path).resolve().is_relative_to(
            Path(folder).resolve()
        )


def outputs(config: Any) -> Iterator[Output]:
    """Yield the folders and files that a command with these flags writes."""
    idle = config.idle_places() | unused_flags(config).keys()
    for flag, value in flags_in(config):
        if flag.writes and value and flag.path not in idle:
            yield Output(named=flag.typed(value), path=value, kind=flag.writes)
    yield from config.further_places()


def inputs(config: Any) -> list[tuple[Flag, str]]:
    """Return the models, datasets and files that a command reads, each with a flag that names it.

    The result has no duplicates.
    """
    found: dict[Path, tuple[Flag, str]] = {}
    for flag, value in flags_in(config):
        if flag.writes or not flag.holds:
            continue
        names: Any = config.given.get(flag.path, value) or ()
        if flag.holds != "place":
            names = items(value)
        elif isinstance(names, str):
            names = [names]
        for name in names:
            path = name
            if flag.holds == "dataset":
                path, _ = dataset_parts(name)
            found.setdefault(Path(path).resolve(), (flag, path))
    return list(found.values())


def overwriting(config: Any) -> Iterator[str]:
    """Yield a violation for each output that would overwrite an input or another output's file."""
    written = list(outputs(config))
    read = inputs(config)
    for output in written:
        for flag, path in read:
            name = f"{flag.name} {path}"
            if output.changes(path):
                yield (
                    f"{output.named} would overwrite {name}, which this command reads: choose "
                    "another path."
                )
            elif flag.holds == "dataset" and output.lies_in(path):
                yield (
                    f"{output.named} is inside {name}, whose files are all read as data: choose "
                    "another path."
                )
        for other in written:
            if output.is_file and not other.is_file and other.changes(output.path):
                yield (
                    f"{output.named} conflicts with a file that the command writes to "
                    f"{other.named}: choose another name."
                )


def model_in(folder: str) -> str | None:
    """Briefly describe the model or adapter in a folder, or return None if there is none."""
    for name in ("adapter_config.json", "config.json"):
        file = Path(folder, name)
        if not file.is_file():
            continue
        kind = name
        with suppress(ValueError, KeyError, AttributeError, TypeError):
            stored = json.loads(file.read_bytes())
            names = stored.get("architectures") or [stored.get("model_type") or stored["peft_type"]]
            kind = " ".join(names)
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
        return f"{kind}, written {written}"
    return None
