"""Stages of one file, each a process of its own, in the order of the file. A stage that is done and
unchanged is skipped.

The file has two YAML documents. The first has `settings`: by name, values that differ between
machines. The second has `stages`, and is rendered by Jinja2 with the chosen values as variables.
`${sft}` is the result of the stage sft.

The folder of a pipeline has, for each stage, its folder, its flags (<stage>.yaml, which --config
reads) and its record (<stage>.json: what the result was made from). What is run anew is moved to
earlier/<n>/ first.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import StringIO
from os.path import exists, expanduser, isfile
from pathlib import Path
from shutil import which
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, TemplateError

from openrlhf.config import machine
from openrlhf.config.flags import ConfigError, did_you_mean, flags_of, items, nearest, text_of
from openrlhf.config.options import leaves, parse_config
from openrlhf.config.pipeline import PipelineConfig
from openrlhf.config.secrets import hide, without_secrets
from openrlhf.config.stages import STAGE_COMMANDS
from openrlhf.files import HASH_BLOCK_BYTES, HASHED_BLOCKS, fingerprint, write_atomically
from openrlhf.launch.pipeline_report import Result, write_pipeline_report
from openrlhf.locks import locked
from openrlhf.observability.run_folder import set_aside
from openrlhf.termination import asked, in_order

USED = re.compile(r"\$\{([\w-]+)\}")
PLACES = {
    "run.dir": ".",
    "ckpt.output_dir": "",
    "output_path": "",
    "ckpt.path": "checkpoints",
}  # "": the result
TRAINED = {
    "model.model_name_or_path",
    "actor.model_name_or_path",
    "critic.model_name_or_path",
}  # flags of trained models
MERGED = {"lora_path", "model_path"}  # flags of what `lora_combiner` merges
PRECISION = {"lora_combiner": {"ds.param_dtype": "fp32"}}  # other commands: --ckpt.export_fp32
DONE, GOES_ON = "done", "goes on"
GRACE_S = 60.0  # for a stage to end that is asked to, and then is killed


def run_pipeline(config: PipelineConfig) -> None:
    """Check all stages, and run those that are not done. Raises ConfigError, or SystemExit with the
    status of a stage.
    """
    with in_order():
        file, folder = Path(config.file), Path(config.run.dir).absolute()
        Pipeline(file=file, folder=folder, stages=read_stages(file, config.settings)).run(
            dry=config.dry_run
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage as the file has it: a command of ours with flags, or the words of another program to
    `run`.
    """

    name: str
    command: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    launcher: str = (
        ""  # what is typed in front of our module, such as `torchrun --nproc_per_node 8 -m`
    )
    run: str = ""
    group: str = ""  # stages of a group differ in their seed: the report has their mean

    @property
    def uses(self) -> list[str]:
        """The stages whose results it reads."""
        named = USED.findall(json.dumps([self.flags, self.run, self.launcher], default=str))
        return [name for name in dict.fromkeys(named) if name != self.name]

    @property
    def root(self) -> type[Any]:
        """The configuration class of its command."""
        return STAGE_COMMANDS[self.command].flags

    @property
    def values(self) -> dict[str, Any]:
        """Its flags by path."""
        return dict(leaves(self.flags, flags_of(self.root), "")) if self.command else {}

    @property
    def reads(self) -> list[str]:
        """The files, and folders of models and data, that it names."""
        found = [word for word in shlex.split(self.run) if isfile(word)]
        for path, value in self.values.items():
            there = exists if flags_of(self.root)[path].holds in ("model", "dataset") else isfile
            texts = items(",".join(map(str, value)) if isinstance(value, list) else str(value))
            found += [place for text in texts if there(place := expanduser(text.partition("@")[0]))]
        return found


def read_stages(file: Path, settings: str) -> list[Stage]:
    """The stages of a file with the settings of this name (none: the first). Raises ConfigError."""
    jinja, here = Environment(undefined=StrictUndefined), str(file.absolute().parent)
    try:
        head, divided, body = text_of("--file", str(file)).rpartition("\n---\n")
        choices = (
            yaml.safe_load(jinja.from_string(head).render(here=here))["settings"] if divided else {}
        )
        if settings and settings not in choices:
            raise ConfigError(
                f"--settings {settings}: {file} has {', '.join(choices) or 'no settings'}."
            )
        values = choices.get(settings or next(iter(choices), ""), {})
        body = jinja.from_string(body).render(values, here=here)
        found: dict[str, Any] = yaml.safe_load(body)["stages"]
        nodes = {key.value: value for key, value in yaml.compose(body).value}
        names = Counter(key.value for key, *_ in nodes["stages"].value)
        if names.total() != len(names) or not names:  # YAML keeps the last of two
            raise ConfigError(
                f"{file}: two stages have one name, or there is none: {', '.join(names.elements())}."
            )
        return [
            Stage(name=str(name), **{key: entry[key] for key in entry if entry[key]})
            for name, entry in found.items()
        ]
    except (yaml.YAMLError, TemplateError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no pipeline: {error}. It has `settings`, a line ---, and `stages`. Each stage has a name, and either "
            "`command` with `flags`, or `run` (docs/pipelines.md)."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of `file`, and the folder of their results. `finished`: when each stage that is
    done was done.
    """

    file: Path
    folder: Path
    stages: Sequence[Stage]
    finished: dict[str, float | None] = field(default_factory=dict[str, float | None])

    def check_all(self) -> None:
        """Raise ConfigError with all that is wrong with any stage. Writes the flags of the stages."""
        broken = {stage.name: self.check(stage) for stage in self.stages}
        if any(broken.values()):
            raise ConfigError(
                [f"{self.file}: stage {name}: {text}" for name in broken for text in broken[name]]
            )

    def check(self, stage: Stage) -> list[str]:
        """What is wrong with a stage. What is said of results does not count: they may not be there
        yet, or be made again.
        """
        before = [each.name for each in self.stages[: self.stages.index(stage)]]
        if not re.fullmatch(r"[\w-]+", stage.name) or stage.name == "earlier":
            return ["a name has letters, digits, _ and -, and is not `earlier`."]
        if bool(stage.command) == bool(stage.run):
            return ["give either command or run."]
        if not isinstance(stage.flags, dict) or (stage.run and (stage.flags or stage.launcher)):
            return [
                "flags are names and values of a command, and so is launcher: a program of `run` has neither."
            ]
        try:
            program, *_ = [*shlex.split(stage.run), *shlex.split(stage.launcher), "true"]
        except (ValueError, AttributeError) as error:
            return [f"run {stage.run!r}, launcher {stage.launcher!r}: {error}."]
        if not USED.search(program) and not which(program, path=search_path()):
            return [f"there is no program {program}."]
        if unknown := [name for name in stage.uses if name not in before]:
            hint = did_you_mean(nearest(unknown[0], before))
            return [
                f"${{{unknown[0]}}} is no stage before this one ({', '.join(before) or 'the first'}).{hint}"
            ]
        if stage.command and stage.command not in STAGE_COMMANDS:
            return [f"there is no command {stage.command}; known are {', '.join(STAGE_COMMANDS)}."]
        if self.file.resolve() in [
            (self.folder / f"{stage.name}{end}").resolve() for end in (".yaml", ".json")
        ]:
            return [
                f"--run.dir {self.folder} contains the pipeline file, under a name that this stage uses: move one."
            ]
        if not stage.command:
            return self.own_folder_read(stage)
        if taken := PLACES.keys() & stage.values.keys():
            return [f"--{path} is given by the pipeline: leave it out." for path in sorted(taken)]
        joined = machine.cluster_gpus
        try:
            with redirect_stderr(StringIO()):  # its notices are printed when it runs
                parse_config(
                    stage.root,
                    ["--config", str(self.write_flags(stage))],
                    command=STAGE_COMMANDS[stage.command].command,
                )
        except ConfigError as error:
            said = [
                text.removeprefix(f"{self.folder / stage.name}.yaml: ") for text in error.violations
            ]
            return [
                text
                for text in said
                if not any(str(self.folder / name) in text for name in stage.uses)
            ]
        finally:
            machine.cluster_gpus = joined
        return self.own_folder_read(stage)

    def own_folder_read(self, stage: Stage) -> list[str]:
        """Return an error for each input in the stage's own folder, which is moved away before the
        stage runs again.
        """
        own = (self.folder / stage.name).resolve()
        inside = [place for place in stage.reads if Path(place).resolve().is_relative_to(own)]
        return [
            f"it reads {place}, in its own folder, which is moved away before it runs."
            for place in inside
        ]

    def result(self, name: str) -> Path:
        """What `${name}` stands for in later stages: a model, a file of answers, or the stage's
        folder.
        """
        command = next(stage.command for stage in self.stages if stage.name == name)
        if command not in STAGE_COMMANDS:
            return self.folder / name
        return self.folder / name / STAGE_COMMANDS[command].result

    def has_result(self, name: str) -> bool:
        """Whether the result of a stage exists. A folder that contains only a lock does not count."""
        result = self.result(name)
        if result.is_dir():
            return any(not file.name.startswith(".") for file in result.iterdir())
        return result.exists()

    def filled(self, stage: Stage, text: str) -> str:
        """A text with the places of results in it; the stage's own name stands for its folder."""
        places = {name: str(self.result(name)) for name in stage.uses} | {
            stage.name: str(self.folder / stage.name)
        }
        return USED.sub(lambda used: places[used[1]], text)

    def write_flags(self, stage: Stage) -> Path:
        """Write the flags of a stage, and where its results go, to a file that --config reads."""
        result = STAGE_COMMANDS[stage.command].result
        places = {
            path: str(self.folder / stage.name / (leaf or result))
            for path, leaf in PLACES.items()
            if path in flags_of(stage.root)
        }
        path = self.folder / f"{stage.name}.yaml"
        precision = self.precision(stage)
        filled = json.loads(
            self.filled(stage, json.dumps({**precision, **stage.flags, **places}, default=str))
        )
        content = yaml.safe_dump(filled, sort_keys=False, allow_unicode=True, width=1000)
        secret = {path for path, flag in flags_of(stage.root).items() if flag.secret}
        private = any(
            path in secret or hide(value) != value for path, value in stage.values.items()
        )
        write_atomically(path, content, mode=0o600 if private else None)
        return path

    def precision(self, stage: Stage) -> dict[str, Any]:
        """Return the flags that keep float32 weights in a result that a later stage trains further."""
        kept = PRECISION.get(stage.command, {"ckpt.export_fp32": True})
        known, given = flags_of(stage.root), stage.values
        if not self.is_trained_further(stage) or any(
            path in given or path not in known for path in kept
        ):
            return {}
        return kept

    def is_trained_further(self, stage: Stage) -> bool:
        """Return whether a later stage trains the result of this one, perhaps merged by a stage in
        between.
        """
        reference = f"${{{stage.name}}}"
        for later in self.stages[self.stages.index(stage) + 1 :]:
            if not later.command or later.command not in STAGE_COMMANDS:
                continue
            reads = {path for path, value in later.values.items() if str(value) == reference}
            trains = "ckpt.export_fp32" in flags_of(later.root)
            if trains and reads & TRAINED:
                return True
            if reads & MERGED and self.is_trained_further(later):
                return True
        return False

    def inputs(self, stage: Stage) -> dict[str, Any]:
        """All that the result of a stage is made from. Not the launcher: the number of devices may
        change on the way.
        """
        of_run = ("logger.", "ds.use_universal_ckpt")
        made = {
            f"--{path}": hide(value)
            for path, value in stage.values.items()
            if not path.startswith(of_run)
        }
        made |= {"command": stage.command, "run": without_secrets(stage.run)}
        made |= {place: content_of(Path(place)) for place in stage.reads}
        return json.loads(
            json.dumps(
                made | {f"${{{name}}}": self.finished.get(name) for name in stage.uses}, default=str
            )
        )

    def run(self, *, dry: bool = False) -> None:
        """Check all stages, and run those that are not done. Raises SystemExit with the status of a
        stage that fails.
        """
        with locked(
            self.folder, f"--run.dir {self.folder}"
        ) as lock:  # a stage inherits it, and may outlive us
            self.check_all()
            try:
                for stage in self.stages:
                    self.run_stage(stage, lock, dry=dry)
            except (KeyboardInterrupt, SystemExit):
                print("The same command goes on from here.", file=sys.stderr)
                raise
        if not dry:
            print(f"All stages are done. Report: {self.report()}")

    def run_stage(self, stage: Stage, lock: int | None, *, dry: bool) -> None:
        """Run a stage, unless it is done and made from what is there now."""
        folder, path = self.folder / stage.name, self.folder / f"{stage.name}.json"
        inputs, record = self.inputs(stage), self.record(stage)
        state = self.state(stage, inputs, record)
        goes_on, done = state == GOES_ON, state == DONE
        self.finished[stage.name] = record["finished"] if done else None
        aside = None if dry or done or goes_on else set_aside(self.folder, [stage.name, path.name])
        print(
            f"{stage.name}: {state}{f'. The old result is in {aside}.' if aside else ''}",
            flush=True,
        )
        if dry or done:
            return
        folder.mkdir(exist_ok=True)
        record = {"inputs": inputs, "seconds": record["seconds"] * goes_on, "finished": None}
        write_atomically(path, json.dumps(record, indent=1))
        start, status = time.monotonic(), None
        try:
            status = execute(self.words(stage, goes_on=goes_on), lock)
            if status == 0 and not self.has_result(stage.name):
                print(
                    f"{self.file}: stage {stage.name} left no {self.result(stage.name)}.",
                    file=sys.stderr,
                )
                status = 1
        finally:
            record["seconds"] += time.monotonic() - start
            record["finished"] = self.finished[stage.name] = time.time() if status == 0 else None
            write_atomically(path, json.dumps(record, indent=1))
        self.report()
        if status:
            print(
                f"{self.file}: stage {stage.name} ended with status {status}; see {folder}.",
                file=sys.stderr,
            )
            raise SystemExit(status if status > 0 else 128 - status)

    def state(self, stage: Stage, inputs: Mapping[str, Any], record: Mapping[str, Any]) -> str:
        """What is to be done with a stage, in words."""
        old = record["inputs"]
        if not old:
            return "runs"
        if changed := [name for name in {**old, **inputs} if old.get(name) != inputs.get(name)]:
            return f"runs again; changed: {', '.join(changed)}"
        if not record["finished"]:
            return GOES_ON if stage.command else "runs again; it did not finish"
        return DONE if self.has_result(stage.name) else "runs again; its result is missing"

    def record(self, stage: Stage) -> dict[str, Any]:
        """What a stage's result was made from, how long that took, and when it was done."""
        path = self.folder / f"{stage.name}.json"
        record = (
            json.loads(path.read_text())
            if path.exists()
            else {"inputs": {}, "seconds": 0.0, "finished": None}
        )
        for name, value in record["inputs"].items():
            record["inputs"][name] = hide(value)  # older releases wrote secrets
        answers = self.result(stage.name)
        if (
            record["inputs"] and answers.is_file()
        ):  # complete, also if we were killed before it was noted
            record["finished"] = record["finished"] or answers.stat().st_mtime
        return record

    def words(self, stage: Stage, *, goes_on: bool) -> list[str]:
        """The command line of a stage, which continues from its checkpoints if it has some."""
        if stage.run:
            return shlex.split(self.filled(stage, stage.run))
        launcher = shlex.split(self.filled(stage, stage.launcher)) or [sys.executable, "-m"]
        kept = goes_on and any((self.folder / stage.name).glob("checkpoints/*"))
        flags = ["--config", str(self.write_flags(stage)), *["--ckpt.load_enable"] * kept]
        return [*launcher, "openrlhf.cli.main", stage.command, *flags]

    def report(self) -> Path:
        """Write the page about all stages that have run."""
        results = [
            Result(
                stage.name, self.folder / stage.name, stage.command, stage.group, record["seconds"]
            )
            for stage in self.stages
            if (record := self.record(stage))["inputs"]
        ]
        return write_pipeline_report(self.folder / "report.html", results, title=self.file.stem)


def execute(words: Sequence[str], lock: int | None) -> int:
    """Run a program to its end, and return its status. If this process is asked to end, the program
    ends first.
    """
    inherited = [] if lock is None else [lock]
    with subprocess.Popen(
        words, env={**os.environ, "PATH": search_path()}, pass_fds=inherited
    ) as child:
        try:
            return child.wait()
        except BaseException:
            by_hand = asked() == 128 + signal.SIGINT  # Ctrl-C has reached the program too
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C once more
                if not by_hand:
                    child.terminate()
                child.wait(None if by_hand else GRACE_S)
            child.kill()
            raise


def search_path() -> str:
    """Where programs are looked up: first beside this Python."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def content_of(place: Path) -> str:
    """A hash of a file, or of all files of a folder. Of long files it has samples, and size and
    time.
    """
    digest = sha256()
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            stat = file.stat()
            long = (
                (stat.st_size, stat.st_mtime_ns)
                if stat.st_size > HASH_BLOCK_BYTES * HASHED_BLOCKS
                else ()
            )
            digest.update(f"{file.relative_to(place)} {fingerprint(file)} {long}\n".encode())
    return digest.hexdigest()[:16]
