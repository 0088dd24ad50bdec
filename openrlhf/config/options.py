"""Parses a command line and a configuration file, and writes configurations as YAML.

Every command calls `parse_config`, which raises one `ConfigError` with all mistakes. The command
prints the error to stderr and exits with status 2.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self, TypeVar

from openrlhf.config import legacy
from openrlhf.config.commands import Command
from openrlhf.config.flags import (
    ConfigError,
    Flag,
    amend,
    convert,
    did_you_mean,
    flags_in,
    mentions,
    nearest,
    text_of,
)
from openrlhf.config.help import help_text
from openrlhf.config.legacy import Group, takes_no_value
from openrlhf.config.legacy_names import ELSEWHERE, NAMES, PARTS, RL_NAMES, RL_PARTS
from openrlhf.config.legacy_values import (
    ENABLE,
    LEVEL,
    OLD_FLAGS,
    SUCCESSORS,
    THRESHOLD,
    accepted_flags,
    current_values,
)
from openrlhf.config.plugins import load_plugins
from openrlhf.config.schema import json_schema
from openrlhf.masking import hide, is_hidden
from openrlhf.reporting import notice, say

OLD_NAMES = {*PARTS, *NAMES, *RL_PARTS, *RL_NAMES}
# Flags that may change in a resumed run without a notice: logging, devices, processes, time limits.
FREE_TO_CHANGE = (
    "run.*",
    "logger.*",
    "ckpt.*",
    "placement.*",
    "use_ms",
    "train.colocate_*",
    "*.max_restarts",
    "*.num_nodes",
    "*.num_gpus_per_node",
    "*timeout",
    "*.workers",
    "*.dataloader_num_workers",
    "*.memory_gib",
    "*offload",
    "*_parallel_size",
    "*_engines",
    "ds.zero_stage",
    "ds.zpg",
    "ds.nvme_path",
    "ds.ring_attn_*",
    "ds.overlap_comm",
    "ds.use_universal_ckpt",
    "*.enable_sleep",
    "vllm.gpu_memory_utilization",
    "vllm.sync_*",
)

R = TypeVar("R", bound=Command)


def parse_config(root: type[R], argv: Sequence[str], *, command: str) -> R:
    """Parse a command line into a resolved and checked configuration.

    Rank 0 prints notices to stderr. `--help` prints the help and exits; `--help_json` prints the
    JSON schema and exits. Raises ConfigError.
    """
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            say(help_text(root, command, topic="".join(argv[place + 1 : place + 2])))
            raise SystemExit(0)
        if word == "--help_json":
            say(json.dumps(json_schema(root, command), indent=2, allow_nan=False))
            raise SystemExit(0)
    reader = Reader(root, command).read(argv)
    config, notices = amend(root(), {**reader.given, "given": reader.given}).resolve(
        command=command
    )
    # A violation caused by another mistake would be misleading.
    broken = [text for text in config.check() if not mentions(text, reader.doubtful)]
    violations = [*reader.problems, *broken]
    notice(*reader.notices)
    if violations:
        raise ConfigError(violations)
    notice(*notices)
    return config


class Reader:
    """Values from a command line and its configuration file, with notices and mistakes.

    `doubtful` contains the flags with an invalid value, and the flags that the user may have meant
    by an unknown name.
    """

    def __init__(self, root: type[Any], command: str) -> None:
        self.command = command
        self.flags = accepted_flags(root)
        self.by_spelling: dict[str, Flag] = {}
        for flag in self.flags.values():
            for spelling in flag.switches:
                self.by_spelling[spelling.removeprefix("--")] = flag
        self.given: dict[str, Any] = {}
        self.notices: list[str] = []
        self.problems: list[str] = []
        self.doubtful: set[str] = set()

    def read(self, argv: Sequence[str]) -> Self:
        """Read a command line and its file, and load plug-ins. Flags take precedence over the file.

        Sets `given` (without defaults), `notices` and `problems`.
        """
        old_names = legacy.aliases(self.flags)
        names = ["config", *self.by_spelling, *old_names]
        groups: list[Group] = []
        for typed_name, words in _split_at_flags(argv):
            name = _full_name(typed_name, names)
            if name != typed_name and name in old_names:
                self.notices.append(f"--{typed_name} is read as --{name}.")
            paths = old_names.get(name, [name])
            groups.append((name, self._drop_separators(paths[0], words)))
        translated = legacy.translate(groups, self.flags)
        self.notices += translated.notices
        self.problems += translated.violations
        typed: dict[str, Any] = {}
        files: list[str] = []
        for name, words in translated.groups:
            if name == "config":
                files.append(" ".join(words))
            elif name:
                self._take(name, words, typed)
            elif words:
                self.problems.append(f"Unexpected argument {' '.join(words)}: no flag takes it.")
        if "" in files or len(files) > 1:
            found = " and ".join(filter(None, files)) or "nothing"
            raise ConfigError(f"--config takes one file, not {found}.")
        file = os.path.expanduser("".join(files))
        written: dict[str, Any] = {}
        if file:
            written = self.read_yaml(file)
        # Load plug-ins first, because they register names that other flags accept.
        for path, value in {"plugin": None, **written, **typed}.items():
            source = ""
            if path not in typed:
                source = f"{file}: "
            self._convert(self.flags[path], value, source)
            if path == "plugin":
                load_plugins(self.given.get(path, ()))
        self._replace_old_flags(translated.spelled)
        if "run.dir" in written and "run.dir" not in typed:
            self._drop_own_folder(Path(file))
        return self

    def _drop_separators(self, name: str, words: Sequence[str]) -> list[str]:
        """Drop each bare -- among the words after a flag, unless the flag still takes a value."""
        flag = self.by_spelling.get(name)
        most = 0.0
        if flag is not None and flag.shape == "list":
            most = math.inf
        elif flag is not None and flag.shape != "switch":
            most = max(_value_counts(flag))
        kept: list[str] = []
        for word in words:
            if word != "--" or len(kept) < most:
                kept.append(word)
        return kept

    def _replace_old_flags(self, spelled: Mapping[str, str]) -> None:
        """Replace old flags in `given` with current flags.

        `spelled` contains the spelling of each flag that was typed under an even older name.
        """
        old = {path: self.given.pop(path, False) for path in OLD_FLAGS}
        old = {path: value for path, value in old.items() if value is not False}
        if not old:
            return
        values = current_values(old, self.given)
        for path, value in values.items():
            self._convert(self.flags[path], value, "")
        names = ", ".join(f"--{spelled.get(path, path)}" for path in old)
        now = " ".join(self.flags[path].typed(value) for path, value in values.items())
        if values:
            sentence = f"{names}: now written as {now}."
        elif current_values(old, {}):
            sentence = f"{names}: no effect, because the current flags are also set."
        else:
            sentence = (
                f"{names}: no effect without --{ENABLE}, which earlier releases required as well. "
                f"To correct the loss, set --{LEVEL}."
            )
        self.notices.append(sentence)

    def _convert(self, flag: Flag, value: Any, source: str) -> None:
        """Set the value of a flag in `given`. Messages name `source`, the file with the value."""
        if value is None and flag.default in (None, ()):
            return  # null in a file means that the flag is not set
        try:
            if is_hidden(value):
                raise ConfigError(
                    f"{flag.name} {hide(value)} contains a masked secret: pass {flag.name} on the "
                    "command line."
                )
            self.given[flag.path] = convert(flag, value)
            if value == "" and flag.optional:
                self.notices.append(f"{source}{flag.name} is empty, which means no value.")
        except ConfigError as error:
            self.problems.append(f"{source}{error}")
            self.doubtful.add(flag.path)

    def _take(self, name: str, words: list[str], typed: dict[str, Any]) -> None:
        """Add the words after a flag to `typed`."""
        flag = self.by_spelling.get(name)
        if flag is None:
            self.problems.append(self._unknown(f"--{name}"))
            return
        counts = _value_counts(flag)
        is_empty = words == [""]  # as an unset shell variable leaves it
        if is_empty and flag.shape in ("list", "switch"):
            words = []
        if flag.shape == "list":
            typed[flag.path] = [*typed.get(flag.path, []), *words]
        elif flag.shape == "switch" and words:
            self.problems.append(takes_no_value(flag.name, words))
        elif flag.shape == "switch":
            typed[flag.path] = flag.switches[f"--{name}"]
        elif is_empty and flag.optional:
            typed[flag.path] = ""
        elif len(words) not in counts:
            found = " ".join(words) or "nothing"
            allowed = " or ".join(map(str, counts))
            self.problems.append(f"{flag.name} takes {allowed} value(s), but {found} follows it.")
            self.doubtful.add(flag.path)
        elif len(words) == 1:
            typed[flag.path] = words[0]
        else:
            typed[flag.path] = words

    def _unknown(self, name: str) -> str:
        """Return the message about an unknown flag, with the flags that the user may have meant.

        `name` is written as the user wrote it: with -- on a command line, and without -- in a file.
        """
        bare = name.removeprefix("--")
        renamed = legacy.aliases(self.flags, ELSEWHERE)
        available: list[str] = []
        for spelling, flag in self.by_spelling.items():
            if not flag.not_yet and flag.path not in OLD_FLAGS:
                available.append(spelling)
        paths: list[str] = []
        for found in renamed.get(bare) or nearest(bare, [*available, *renamed]):
            paths += renamed.get(found, [found])
        paths = list(dict.fromkeys(SUCCESSORS.get(path, path) for path in paths))
        self.doubtful.update(paths)
        dashes = name.removesuffix(bare)
        hint = did_you_mean([dashes + path for path in paths])
        section = f"{bare.rstrip('.')}."
        if any(path.startswith(section) for path in available):
            hint += f" --help {section} lists the flags of this section."
        return f"{self.command} has no flag {name}.{hint}"

    def _drop_own_folder(self, file: Path) -> None:
        """Drop `run.dir` from the file if it names the file's own folder, which belongs to an
        earlier run.
        """
        folder = self.given.get("run.dir")
        if folder and Path(folder).resolve() == file.resolve().parent:
            del self.given["run.dir"]
            self.notices.append(
                f"--run.dir {folder} belongs to the run that wrote {file}: this run gets its own "
                "folder."
            )

    def read_yaml(self, file: str) -> dict[str, Any]:
        """Return the values in a file by flag path. The file's keys may be nested or dotted.

        Raises ConfigError if the file cannot be read or a section has a key twice.
        """
        import yaml  # slow to import and needed only with a configuration file

        if Path(file).name == "config_resolved.yaml":
            self.problems.append(
                f"--config {file} also contains derived values: use config.yaml from the same "
                "folder."
            )
        try:
            content = yaml_content(file, text_of("--config", file))
        except yaml.YAMLError as error:
            raise ConfigError(f"--config {file} cannot be read: {error}") from error
        if not isinstance(content, dict | None):
            raise ConfigError(
                f"--config {file} contains a {type(content).__name__}, not names and values."
            )
        values: dict[str, Any] = {}
        for path, value in leaves(content or {}, self.flags, ""):
            if path in values:
                self.problems.append(f"{file}: {path} appears twice: remove one.")
            elif path in self.flags:
                values[path] = value
            else:
                self.problems.append(f"{file}: {self._unknown(path)}")
        return values


def _split_at_flags(argv: Iterable[str]) -> list[Group]:
    """Return each flag with the words after it. Words before the first flag get the name "".

    Old names may have a single dash, such as -pretrain. A word of dashes only is not a flag.
    """
    groups: list[Group] = [("", [])]
    for word in argv:
        bare, equals, value = word.lstrip("-").partition("=")
        if bare and (word.startswith("--") or (word.startswith("-") and bare in OLD_NAMES)):
            words: list[str] = []
            if equals:
                words.append(value)
            groups.append((bare, words))
        else:
            groups[-1][1].append(word)
    return groups


def _value_counts(flag: Flag) -> tuple[int, ...]:
    """Return how many words a flag takes, if it is not a list or a switch."""
    if flag.single is not None:
        return (1, 2)
    if flag.shape == "pair":
        return (2,)
    return (1,)


def _full_name(prefix: str, names: Iterable[str]) -> str:
    """Return the only name that starts with a prefix, or the prefix if it is not unique."""
    candidates = [name for name in names if name.startswith(prefix)]
    if prefix and len(candidates) == 1:
        return candidates[0]
    return prefix  # empty for the words before the first flag


def yaml_content(file: str, text: str) -> Any:
    """Return the content of a YAML file with this text.

    Raises ConfigError if a section has a key twice, because YAML would ignore the first one, and
    YAMLError for any other mistake.
    """
    import yaml  # slow to import and needed only with a file

    loader: Any = yaml.SafeLoader(text)
    loader.name = file  # the error shows it next to the line
    root = loader.get_single_node()
    if isinstance(root, yaml.MappingNode) and (repeated := list(_repeated_keys(root, ""))):
        raise ConfigError([f"{file}: {path} appears twice: remove one." for path in repeated])
    if root is None:
        return None
    return loader.construct_document(root)


def _repeated_keys(section: Any, prefix: str) -> Iterator[str]:
    """Yield the path of each key that a section, or a section inside it, has a second time."""
    keys: list[str] = []
    for key, value in section.value:
        path = f"{prefix}{key.value}"
        if key.value in keys:
            yield path
        keys.append(key.value)
        if value.id == "mapping":
            yield from _repeated_keys(value, f"{path}.")


def leaves(node: Any, flags: Mapping[str, Flag], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each entry in a file. The file's keys may be nested or dotted."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if path not in flags and isinstance(value, dict):
            yield from leaves(value, flags, f"{path}.")
        else:
            yield path, value


def dump_yaml(config: Command, *, given_only: bool = False) -> str:
    """Return the configuration as YAML: all values in effect, or only those that the user set.

    `--config` accepts only YAML that was written with `given_only`. The YAML omits per-launch flags
    (`--dry_run`, `--local_rank`) and the W&B key. Secrets in URLs are masked.
    """
    import yaml  # slow to import and needed only to write or compare files

    tree: dict[str, Any] = {}
    for flag, value in flags_in(config):
        if not flag.saved or (given_only and flag.path not in config.given):
            continue
        *sections, leaf = flag.path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if given_only:
            value = config.given[flag.path]
        node[leaf] = hide(value)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def changed_flags(before: str, config: Command) -> list[str]:
    """Return the flags whose values differ from those in an earlier `dump_yaml`, with both values.

    The result omits output paths, flags that match `FREE_TO_CHANGE`, and flags that exist in only
    one of the two releases.
    """
    import yaml  # slow to import and needed only to write or compare files

    flags = accepted_flags(config.__class__)
    try:
        earlier: Any = yaml.safe_load(before)
    except yaml.YAMLError:
        return []
    if not isinstance(earlier, dict):
        return []
    old = dict(leaves(earlier, flags, ""))
    if replaced := {path: old.pop(path) for path in OLD_FLAGS if path in old}:
        current: dict[str, Any] = {}
        if THRESHOLD in old:
            current[THRESHOLD] = old[THRESHOLD]
        old |= {LEVEL: "off"} | current_values(replaced, current)
    changed: list[str] = []
    for flag, value in flags_in(config):
        now = hide(value)
        is_free = flag.writes or any(fnmatch(flag.path, pattern) for pattern in FREE_TO_CHANGE)
        if not is_free and flag.path in old and old[flag.path] != now:
            changed.append(f"{flag.name} {now} (before: {hide(old[flag.path])})")
    return changed
