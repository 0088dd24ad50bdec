"""Parses pipeline files, which contain settings and stages.

A file has two YAML documents. The first document defines `settings`: values that differ between
machines, grouped under a name for each kind of machine. The second document defines `stages` and is
a Jinja2 template, rendered with the selected settings as variables. `${sft}` refers to the result
of stage `sft`.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import exists, expanduser, isfile
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, TemplateError

from openrlhf.config.flags import ConfigError, dataset_parts, flags_of, items, text_of
from openrlhf.config.options import leaves, yaml_content
from openrlhf.config.stages import STAGE_COMMANDS

STAGE_REFERENCE = re.compile(r"\$\{([\w-]+)\}")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage: a command of this package with its flags, or another program to `run`."""

    name: str
    command: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    launcher: str = ""  # words placed before the module, such as `torchrun --nproc_per_node 8 -m`
    run: str = ""
    group: str = ""  # stages in a group differ only in their seed; the report shows their mean

    @property
    def uses(self) -> list[str]:
        """The names of the other stages whose results this stage reads."""
        text = json.dumps([self.flags, self.run, self.launcher], default=str)
        names = dict.fromkeys(STAGE_REFERENCE.findall(text))
        names.pop(self.name, None)
        return list(names)

    @property
    def root(self) -> type[Any]:
        """The configuration class of the command."""
        return STAGE_COMMANDS[self.command].flags

    @property
    def values(self) -> dict[str, Any]:
        """The flag values by path; empty for a program."""
        if not self.command:
            return {}
        return dict(leaves(self.flags, flags_of(self.root), ""))

    @property
    def input_paths(self) -> list[str]:
        """The files and the model or data folders named by the stage."""
        found = [word for word in shlex.split(self.run) if isfile(word)]
        for path, value in self.values.items():
            is_input = isfile
            if flags_of(self.root)[path].holds in ("model", "dataset"):
                is_input = exists
            text = str(value)
            if isinstance(value, list):
                text = ",".join(map(str, value))
            for item in items(text):
                place, _ = dataset_parts(expanduser(item))
                if is_input(place):
                    found.append(place)
        return found


def read_stages(file: Path, settings: str) -> list[Stage]:
    """Return the stages of a file, rendered with the settings named `settings`.

    If `settings` is empty, the first settings in the file are used. Raises ConfigError.
    """
    jinja = Environment(undefined=StrictUndefined)
    here = str(file.absolute().parent)
    head, divider, body = text_of("--file", str(file)).rpartition("\n---\n")
    try:
        choices: dict[str, Any] = {}
        if divider:
            head = jinja.from_string(head).render(here=here)
            choices = yaml_content(str(file), head)["settings"]
        if settings and settings not in choices:
            known = ", ".join(choices) or "no settings"
            raise ConfigError(
                f"--settings {settings} does not exist in {file}. Available: {known}."
            )
        chosen = settings or next(iter(choices), "")
        body = jinja.from_string(body).render(choices.get(chosen, {}), here=here)
        entries: dict[str, Any] = yaml_content(str(file), body)["stages"]
        if not entries:
            raise ConfigError(f"{file} has no stages.")
        stages: list[Stage] = []
        for name, entry in entries.items():
            given = {key: value for key, value in entry.items() if value}
            stages.append(Stage(name=str(name), **given))
        return stages
    except (yaml.YAMLError, TemplateError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a valid pipeline file: {error}. A pipeline file has `settings`, a line "
            "with ---, and `stages`. Each stage has a name and either `command` with `flags`, or "
            "`run` (docs/pipelines.md)."
        ) from error
