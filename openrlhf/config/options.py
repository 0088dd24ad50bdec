"""From a command line and a configuration file to a resolved, checked tree, and back to a file.

`parse_config` is the entry of every command. It raises `ConfigError` with everything that is wrong
at once; the command prints that to stderr and exits with status 2.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from openrlhf.config import legacy
from openrlhf.config.commands import Command
from openrlhf.config.flags import (
    ConfigError,
    Flag,
    amend,
    convert,
    did_you_mean,
    flags_in,
    flags_of,
    mentions,
    nearest,
)
from openrlhf.config.help import help_text
from openrlhf.config.legacy import Group, takes_no_value
from openrlhf.config.plugins import load_plugins
from openrlhf.config.unsupported import is_refused
from openrlhf.masking import hide, is_hidden
from openrlhf.reporting import notice, say

MOST_HINTS = 4
# Flags that may change from one start of a run to the next without a notice: logging, devices,
# processes, time limits.
FREE_TO_CHANGE = (
    "run.*", "logger.*", "ckpt.*", "placement.*", "use_ms", "train.colocate_*", "train.max_restarts", "*.num_nodes",
    "*.num_gpus_per_node", "*_timeout", "*.timeout", "*.workers", "*.dataloader_num_workers", "*.memory_gib",
    "*.offload", "*_offload", "*_parallel_size", "*_engines", "ds.zero_stage", "ds.zpg", "ds.nvme_path",
    "ds.ring_attn_*", "ds.overlap_comm", "ds.use_universal_ckpt", "*.enable_sleep", "vllm.max_restarts",
    "vllm.gpu_memory_utilization", "vllm.sync_*",
)  # fmt: skip

R = TypeVar("R", bound=Command)


def parse_config(root: type[R], argv: Sequence[str], *, command: str) -> R:
    """The resolved and checked configuration of a command line.

    Prints notices to stderr, in rank 0 only. `--help` prints and exits. Raises ConfigError.
    """
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            say(help_text(root, command, topic="".join(argv[place + 1 : place + 2])))
            raise SystemExit(0)
    reader = Reader(root, command).read(argv)
    config, notices = amend(root(), {**reader.given, "given": reader.given}).resolve(
        command=command
    )
    # What follows from a mistake would only mislead.
    broken = [text for text in config.check() if not mentions(text, reader.doubtful)]
    violations = [*reader.problems, *broken]
    notice(*reader.notices)
    if violations:
        raise ConfigError(violations)
    notice(*notices)
    return config


class Reader:
    """Reads one command line and its file. `doubtful`: flags with a wrong value, or meant by a name
    that is wrong.
    """

    def __init__(self, root: type[Any], command: str) -> None:
        self.root, self.command, self.flags = root, command, flags_of(root)
        self.given: dict[str, Any] = {}
        self.notices: list[str] = []
        self.problems: list[str] = []
        self.doubtful: set[str] = set()

    def read(self, argv: Sequence[str]) -> Self:
        """Fill `given` (without defaults), `notices` and `problems`; flags win over the file. Loads
        plug-ins.
        """
        old = legacy.translate(_groups(argv), self.flags)
        self.notices += old.notices
        self.problems += old.violations
        typed, file = dict[str, Any](), ""
        for name, words in old.groups:
            if name == "config":
                file = os.path.expanduser(" ".join(words))
            elif not name:
                self.problems.append(f"{' '.join(words)} follows no flag that takes it.")
            else:
                self._take(name, words, typed)
        written = self.read_yaml(file) if file else {}
        for path, value in {"plugin": None, **written, **typed}.items():
            flag = self.flags[path]
            try:
                if is_hidden(value):
                    raise ConfigError(
                        f"{flag.name} {hide(value)} contains a masked secret: give {flag.name} on the command line."
                    )
                if value is not None or flag.default not in (
                    None,
                    (),
                ):  # else null in a file: not given
                    self.given[path] = convert(flag, value)
            except ConfigError as error:
                self.problems.append(f"{file}: {error}" if path not in typed else str(error))
                self.doubtful.add(path)
            if path == "plugin":  # the first: values of other flags may be names that it registers
                load_plugins(self.given.get(path, ()))
        self._keep_apart(Path(file), written.keys() - typed.keys())
        return self

    def _take(self, name: str, words: list[str], typed: dict[str, Any]) -> None:
        """Note the words after a name, or the unique beginning of a name, if it is a flag that
        takes so many.
        """
        spellings = {
            text[2:]: (flag, on)
            for flag in self.flags.values()
            for text, on in flag.switches.items()
        }
        begun = (
            [name]
            if name in spellings
            else [spelling for spelling in spellings if spelling.startswith(name)]
        )
        if len(begun) != 1:
            self.problems.append(self._no_such(f"--{name}"))
            return
        flag, meaning = spellings[begun[0]]
        if flag.shape == "list":
            typed[flag.path] = [*typed.get(flag.path, []), *words]
        elif flag.shape == "switch" and words:
            self.problems.append(takes_no_value(flag.name, words))
        elif flag.shape == "switch":
            typed[flag.path] = meaning
        elif len(words) == (2 if flag.shape == "pair" else 1):
            typed[flag.path] = words if flag.shape == "pair" else words[0]
        else:
            arity = "two values" if flag.shape == "pair" else "one value"
            self.problems.append(
                f"{flag.name} takes {arity}, but {' '.join(words) or 'nothing'} follows it."
            )
            self.doubtful.add(flag.path)

    def _no_such(self, name: str) -> str:
        """`name` as typed: with -- on a command line, without it in a file."""
        bare, defaults = name.removeprefix("--"), self.root()
        meant = legacy.aliases(
            self.flags, legacy.ELSEWHERE
        )  # also by those who come from another framework
        there = [flag for flag in self.flags.values() if not is_refused(flag.path, defaults)]
        names = [*(spelling[2:] for flag in there for spelling in flag.switches), *meant]
        close = (
            meant.get(bare)
            or nearest(bare, names)
            or [path for path in [*self.flags, *meant] if path.startswith(bare)]
        )
        paths = list(dict.fromkeys(path for each in close for path in meant.get(each, [each])))[
            :MOST_HINTS
        ]
        self.doubtful.update(paths)
        return f"{self.command} has no flag {name}.{did_you_mean([name.removesuffix(bare) + path for path in paths])}"

    def _keep_apart(self, file: Path, written: set[str]) -> None:
        """Drop a `run.dir` that comes from the file of an earlier run: it is that run's own folder."""
        if file.name == "config_resolved.yaml":
            self.problems.append(
                f"--config {file} also has derived values: give config.yaml beside it."
            )
        run = self.given.get("run.dir") if "run.dir" in written else None
        if run and Path(run).resolve() == file.resolve().parent:
            del self.given["run.dir"]
            self.notices.append(
                f"--run.dir {run} belongs to the run that wrote {file}: this run has a folder of its own."
            )

    def read_yaml(self, file: str) -> dict[str, Any]:
        """The values of a file by path (keys nested or dotted). Raises ConfigError if it cannot be
        read.
        """
        import yaml  # only runs with a file pay for it

        try:
            content: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"--config {file} cannot be read: {error}") from error
        if not isinstance(content, dict | None):
            raise ConfigError(
                f"--config {file} holds a {type(content).__name__}, not names and values."
            )
        values: dict[str, Any] = {}
        for path, value in leaves(cast("dict[Any, Any]", content or {}), self.flags, ""):
            if path in values:
                self.problems.append(f"{file}: {path} is there twice.")
            elif path in self.flags:
                values[path] = value
            else:
                self.problems.append(f"{file}: {self._no_such(path)}")
        return values


def _groups(argv: Iterable[str]) -> list[Group]:
    """Each flag with its words; words before all flags have the name "". Old names may have one
    dash: -pretrain.
    """
    groups: list[Group] = [("", [])]
    for word in argv:
        bare, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") or (
            word.startswith("-") and bare in legacy.NAMES | legacy.RL_NAMES
        ):
            groups.append((bare, [value] if equals else []))
        else:
            groups[-1][1].append(word)
    return groups if groups[0][1] else groups[1:]


def leaves(
    node: Mapping[Any, Any], flags: Mapping[str, Flag], prefix: str
) -> Iterator[tuple[str, Any]]:
    """The values of a file by path; its names may be nested or have dots."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if path not in flags and isinstance(value, dict):
            yield from leaves(cast("dict[Any, Any]", value), flags, f"{path}.")
        else:
            yield path, value


def dump_yaml(config: Command, *, given_only: bool = False) -> str:
    """The configuration as YAML: every value in effect, or what was given, which `--config` reads
    back.

    What belongs to one launch (`--dry_run`, `--local_rank`) and the W&B key are left out; secrets
    in URLs are hidden.
    """
    import yaml  # only runs that write a file pay for it

    tree: dict[str, Any] = {}
    for flag, value in flags_in(config):
        if flag.saved and (flag.path in config.given or not given_only):
            *sections, leaf = flag.path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            shown = hide(config.given[flag.path] if given_only else value)
            node[leaf] = list(shown) if flag.shape in ("pair", "list") and shown else shown
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def changed_flags(before: str, config: Command) -> list[str]:
    """Return the flags whose values differ from those of `before`, an earlier `dump_yaml` of a run,
    with both values.

    Flags that say where to write, and those of `FREE_TO_CHANGE`, are left out, as are flags that
    only one release has.
    """
    import yaml  # only runs that write a file pay for it

    flags = flags_of(config.__class__)
    try:
        earlier: Any = yaml.safe_load(before)
    except yaml.YAMLError:
        return []
    if not isinstance(earlier, dict):
        return []
    old = dict(leaves(cast("dict[Any, Any]", earlier), flags, ""))
    changed: list[str] = []
    for path, value in leaves(yaml.safe_load(dump_yaml(config)), flags, ""):
        free = flags[path].writes or any(fnmatch(path, pattern) for pattern in FREE_TO_CHANGE)
        if not free and path in old and old[path] != value:
            changed.append(f"--{path} {value} (before: {hide(old[path])})")
    return changed
