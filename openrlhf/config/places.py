"""Where a command writes, and the check that it does not overwrite anything that it reads.

The field `writes` of a flag names the kind of output in its folder or file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import Flag, flags_in, items

# By kind of output, the names in its folder that the command writes, replaces or moves.
OWNED = {
    "model": (
        "config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*.bin*", "adapter_*",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
        "special_tokens_map.json", "added_tokens.json", "chat_template.*", "additional_chat_templates",
    ),
    "checkpoints": ("*",),
    "episodes": ("step-*.jsonl.gz", "eval-*.jsonl.gz"),
    "run": (
        "config.yaml", "config_resolved.yaml", "metrics.jsonl", "samples.jsonl", "texts.txt", "report.html", "logs", "wandb_id",
        "wandb", "earlier",
    ),
    "stages": (),  # their names are in the file
    "events": (),  # TensorBoard adds files
}  # fmt: skip
BESIDE_FILE = ("", ".part", ".request", ".new")  # ends of the names that belong to an output file


@dataclass(frozen=True, kw_only=True)
class Output:
    """A folder or file that a command writes. `named`: the flag as it is typed."""

    named: str
    path: str
    kind: str

    @property
    def is_file(self) -> bool:
        """Whether the output is a file."""
        return self.kind == "file"

    @property
    def real(self) -> str:
        """The path without links."""
        return os.path.realpath(self.path)

    def changes(self, path: str) -> bool:
        """Whether the command would write, replace or move what is at `path`."""
        read = os.path.realpath(path)
        if self.is_file:
            return read in [self.real + end for end in BESIDE_FILE]
        if read == self.real:
            return self.kind in ("model", "checkpoints", "episodes")
        inside = os.path.relpath(read, self.real).split(os.sep)
        if inside[0] == os.pardir:
            return False
        return any(fnmatch(inside[0], pattern) for pattern in OWNED[self.kind])

    def lies_in(self, folder: str) -> bool:
        """Whether the output is a folder of data, or inside it."""
        data = os.path.realpath(folder)
        return os.path.isdir(data) and (self.real == data or self.real.startswith(data + os.sep))


@dataclass(frozen=True, kw_only=True)
class Input:
    """A model, data or a file that a command reads, and the flag that names it."""

    flag: Flag
    path: str


def outputs(config: Any) -> Iterator[Output]:
    """The folders and files that a command with these flags writes."""
    idle = config.idle_places() | unused_flags(config).keys()
    for flag, value in flags_in(config):
        if flag.writes and value and flag.path not in idle:
            yield Output(named=flag.typed(value), path=value, kind=flag.writes)
    for named, path, kind in config.further_places():
        yield Output(named=named, path=path, kind=kind)


def inputs(config: Any) -> list[Input]:
    """The models, data and files that a command reads. What several flags name comes once."""
    found: dict[str, Input] = {}
    for flag, resolved in flags_in(config):
        value: Any = config.given.get(flag.path, resolved) if flag.holds == "place" else resolved
        if not flag.holds or flag.writes or not value:
            continue
        if not isinstance(value, str):
            paths: list[str] = list(value)
        elif flag.holds == "place":
            paths = [value]
        else:
            paths = items(value)
        for path in paths:
            if flag.holds == "dataset" and not os.path.exists(path):
                path = path.partition("@")[0]  # of a hub name, a folder
            found.setdefault(os.path.realpath(path), Input(flag=flag, path=path))
    return list(found.values())


def overwriting(config: Any) -> Iterator[str]:
    """Yield a violation for each output that would overwrite an input of the command, or a file of
    another output.
    """
    written, read = list(outputs(config)), inputs(config)
    for output in written:
        for source in read:
            name = f"{source.flag.name} {source.path}"
            if output.changes(source.path):
                yield (
                    f"{output.named} would overwrite {name}, which this command reads: choose "
                    "another path."
                )
            elif source.flag.holds == "dataset" and output.lies_in(source.path):
                yield (
                    f"{output.named} is inside {name}, whose files are all read as data: choose "
                    "another path."
                )
        for other in written:
            if output.is_file and not other.is_file and other.changes(output.path):
                yield (
                    f"{output.named} has the name of a file of {other.named}: choose another name."
                )


def model_in(folder: str) -> str | None:
    """Describe the model or adapter in a folder in a few words; None without one."""
    for name in ("adapter_config.json", "config.json"):
        file = Path(folder, name)
        if not file.is_file():
            continue
        try:
            stored = json.loads(file.read_bytes())
            kind = " ".join(
                stored.get("architectures") or [stored.get("model_type") or stored["peft_type"]]
            )
        except (ValueError, KeyError, AttributeError, TypeError):
            kind = name
        return f"{kind}, written {time.strftime('%Y-%m-%d %H:%M', time.localtime(file.stat().st_mtime))}"
    return None
