"""Pipelines that run the stages of a file in order, each stage in its own process.

A stage is skipped if it is done and its inputs have not changed.

For each stage, the pipeline's folder contains a subfolder, the stage's flags (<stage>.yaml, read
with --config) and the stage's record (<stage>.json, which lists the inputs that produced the
result). Before a stage is rerun from the start, its old folder and record are moved to
earlier/<n>/.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import StringIO
from pathlib import Path
from shutil import which
from typing import Any, TypedDict

import yaml

from openrlhf.config import machine
from openrlhf.config.flags import ConfigError, did_you_mean, flags_of, nearest
from openrlhf.config.options import parse_config
from openrlhf.config.pipeline import PipelineConfig
from openrlhf.config.stages import STAGE_COMMANDS
from openrlhf.files import HASH_BLOCK_BYTES, HASHED_BLOCKS, fingerprint, write_atomically
from openrlhf.launch.pipeline_file import STAGE_REFERENCE, Stage, read_stages
from openrlhf.launch.pipeline_report import write_pipeline_report
from openrlhf.locks import locked
from openrlhf.masking import hide, without_secrets
from openrlhf.observability.run_folder import set_aside
from openrlhf.reporting import alert, say
from openrlhf.termination import asked, exit_on_signals

# Flags for output paths, which the pipeline sets relative to the stage's folder.
# An empty value stands for the path of the stage's result.
PLACES = {"run.dir": ".", "ckpt.output_dir": "", "output_path": "", "ckpt.path": "checkpoints"}
# Flags that name a model to train.
TRAINED = {"model.model_name_or_path", "actor.model_name_or_path", "critic.model_name_or_path"}
MERGED = {"lora_path", "model_path"}  # model flags of `lora_combiner`
# Flags that make a command write float32 weights. The default is --ckpt.export_fp32.
PRECISION = {"lora_combiner": {"ds.param_dtype": "fp32"}}
NOT_INPUTS = ("logger.", "ds.use_universal_ckpt")  # flags that do not affect a result
DONE = "done"
RESUMES = "resumes"
STAGE_END_TIMEOUT_S = 60.0  # delay between SIGTERM and SIGKILL


def run_pipeline(config: PipelineConfig) -> None:
    """Check all stages, then run the unfinished stages.

    Raises ConfigError if a check fails, and SystemExit with the stage's exit status if a stage
    fails.
    """
    with exit_on_signals():
        file = Path(config.file)
        folder = Path(config.run.dir).absolute()
        pipeline = Pipeline(file=file, folder=folder, stages=read_stages(file, config.settings))
        # Stages inherit the lock, because a stage may outlive this process.
        with locked(folder, f"--run.dir {folder}") as lock:
            pipeline.check_all()
            try:
                for stage in pipeline.stages:
                    pipeline.run_stage(stage, lock, dry=config.dry_run)
            except (KeyboardInterrupt, SystemExit):
                alert("To resume, run the same command again.")
                raise
        if not config.dry_run:
            say(f"All stages are done. Report: {pipeline.report()}")


class Record(TypedDict):
    """The content of <stage>.json, which describes how a stage's result was produced."""

    inputs: dict[str, Any]  # as returned by `Pipeline.inputs`; empty if the stage has never started
    seconds: float  # run time, summed over all attempts
    finished: float | None  # Unix time at which the stage finished; None if it has not


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of `file` and the folder for their results."""

    file: Path
    folder: Path
    stages: Sequence[Stage]
    # Unix time at which each stage finished; None if it has not.
    finished: dict[str, float | None] = field(default_factory=dict[str, float | None])

    def check_all(self) -> None:
        """Write the flags of every stage. Raises ConfigError, listing the errors of all stages."""
        errors: list[str] = []
        for stage in self.stages:
            errors += [f"{self.file}: stage {stage.name}: {text}" for text in self.check(stage)]
        if errors:
            raise ConfigError(errors)

    def check(self, stage: Stage) -> list[str]:
        """Return the errors of a stage.

        Errors about other stages' results are ignored, because a result may not exist yet or may be
        replaced.
        """
        error = self.check_entry(stage)
        if error:
            return [error]
        if not stage.command:
            return self.check_own_folder(stage)
        taken = sorted(PLACES.keys() & stage.values.keys())
        if taken:
            return [f"the pipeline sets --{path} itself. Remove the flag." for path in taken]
        declared_gpus = machine.cluster_gpus
        try:
            with redirect_stderr(StringIO()):  # the stage prints its notices itself when it runs
                words = ["--config", str(self.write_flags(stage))]
                parse_config(stage.root, words, command=STAGE_COMMANDS[stage.command].command)
        except ConfigError as error:
            prefix = f"{self.folder / stage.name}.yaml: "
            violations = [text.removeprefix(prefix) for text in error.violations]
            for name in stage.uses:
                result = str(self.folder / name)
                violations = [text for text in violations if result not in text]
            return violations
        finally:
            machine.cluster_gpus = declared_gpus
        return self.check_own_folder(stage)

    def check_entry(self, stage: Stage) -> str:
        """Return the first error in a stage's entry, checked before its flags are parsed, or ""."""
        if not re.fullmatch(r"[\w-]+", stage.name) or stage.name == "earlier":
            return (
                "a stage name may contain only letters, digits, _ and -, and cannot be `earlier`. "
                "Rename it."
            )
        if bool(stage.command) == bool(stage.run):
            return "set either `command` or `run`."
        if not isinstance(stage.flags, dict):
            return f"`flags` must map names to values, but it is a {type(stage.flags).__name__}."
        if stage.run and (stage.flags or stage.launcher):
            return "`flags` and `launcher` require `command`. Remove them from a stage with `run`."
        try:
            words = [*shlex.split(stage.run), *shlex.split(stage.launcher)]
        except (ValueError, AttributeError) as error:
            return f"run {stage.run!r}, launcher {stage.launcher!r}: {error}."
        if words and not STAGE_REFERENCE.search(words[0]):
            if not which(words[0], path=search_path()):
                return f"the program {words[0]} was not found. Install it, or correct its name."
        before = [each.name for each in self.stages[: self.stages.index(stage)]]
        for name in stage.uses:
            if name not in before:
                known = ", ".join(before) or "none"
                hint = did_you_mean(nearest(name, before))
                return f"${{{name}}} is not an earlier stage. Earlier stages: {known}.{hint}"
        if stage.command and stage.command not in STAGE_COMMANDS:
            known = ", ".join(STAGE_COMMANDS)
            return f"the command {stage.command} does not exist. Commands: {known}."
        for suffix in (".yaml", ".json"):
            if self.file.resolve() == (self.folder / f"{stage.name}{suffix}").resolve():
                return (
                    f"--run.dir {self.folder} contains the pipeline file under a name that this "
                    "stage would overwrite. Move the file, or use a different --run.dir."
                )
        return ""

    def check_own_folder(self, stage: Stage) -> list[str]:
        """Return an error for each input that lies in the stage's own folder.

        The folder is moved aside before the stage reruns.
        """
        folder = (self.folder / stage.name).resolve()
        return [
            f"it reads {place} from its own folder, which is moved aside before the stage runs. "
            "Move the file to another folder."
            for place in stage.input_paths
            if Path(place).resolve().is_relative_to(folder)
        ]

    def result(self, name: str) -> Path:
        """Return the value that replaces `${name}` in another stage.

        The value is the path of the model or answer file that the stage writes, or the stage's
        folder.
        """
        command = next(stage.command for stage in self.stages if stage.name == name)
        if command not in STAGE_COMMANDS:
            return self.folder / name
        return self.folder / name / STAGE_COMMANDS[command].result

    def has_result(self, name: str) -> bool:
        """Return whether the result of a stage exists.

        A folder with only hidden files, such as a lock file, does not count as a result.
        """
        result = self.result(name)
        if result.is_dir():
            return any(not file.name.startswith(".") for file in result.iterdir())
        return result.exists()

    def filled(self, stage: Stage, text: str) -> str:
        """Return the text with references such as `${sft}` replaced by result paths.

        A reference to the stage itself is replaced by the stage's folder.
        """
        places = {stage.name: str(self.folder / stage.name)}
        for name in stage.uses:
            places[name] = str(self.result(name))
        return STAGE_REFERENCE.sub(lambda reference: places[reference[1]], text)

    def write_flags(self, stage: Stage) -> Path:
        """Write a stage's flags, with result paths filled in, to a file for --config."""
        known = flags_of(stage.root)
        places: dict[str, str] = {}
        for path, place in PLACES.items():
            if path in known:
                inside = place or STAGE_COMMANDS[stage.command].result
                places[path] = str(self.folder / stage.name / inside)
        flags = {**self.precision(stage), **stage.flags, **places}
        filled = json.loads(self.filled(stage, json.dumps(flags, default=str)))
        content = yaml.safe_dump(filled, sort_keys=False, allow_unicode=True, width=1000)
        secret = {path for path, flag in known.items() if flag.secret}
        values = stage.values.items()
        is_secret = any(path in secret or hide(value) != value for path, value in values)
        file = self.folder / f"{stage.name}.yaml"
        write_atomically(file, content, mode=0o600 if is_secret else None)
        return file

    def precision(self, stage: Stage) -> dict[str, Any]:
        """Return the flags that export float32 weights if a later stage trains the result."""
        if not self.is_trained_further(stage):
            return {}
        kept = PRECISION.get(stage.command, {"ckpt.export_fp32": True})
        for path in kept:
            if path in stage.values or path not in flags_of(stage.root):
                return {}
        return kept

    def is_trained_further(self, stage: Stage) -> bool:
        """Return whether a later stage trains this stage's result, directly or after a merge."""
        reference = f"${{{stage.name}}}"
        for later in self.stages[self.stages.index(stage) + 1 :]:
            if later.command not in STAGE_COMMANDS:
                continue
            flags = {path for path, value in later.values.items() if str(value) == reference}
            if flags & TRAINED and "ckpt.export_fp32" in flags_of(later.root):
                return True
            if flags & MERGED and self.is_trained_further(later):
                return True
        return False

    def inputs(self, stage: Stage) -> dict[str, Any]:
        """Return a mapping from names to everything that determines a stage's result.

        The launcher is left out, because the number of devices may change when a stage resumes.
        """
        inputs: dict[str, Any] = {}
        for path, value in stage.values.items():
            if not path.startswith(NOT_INPUTS):
                inputs[f"--{path}"] = hide(value)
        inputs["command"] = stage.command
        inputs["run"] = without_secrets(stage.run)
        for place in stage.input_paths:
            inputs[place] = content_of(Path(place))
        for name in stage.uses:
            inputs[f"${{{name}}}"] = self.finished.get(name)
        return json.loads(json.dumps(inputs, default=str))

    def run_stage(self, stage: Stage, lock: int | None, *, dry: bool) -> None:
        """Run a stage, unless it is done and its inputs have not changed."""
        inputs = self.inputs(stage)
        old = self.record(stage)
        state = self.state(stage, inputs, old)
        self.finished[stage.name] = old["finished"] if state == DONE else None
        if state == DONE or dry:
            say(f"{stage.name}: {state}")
            return
        line = f"{stage.name}: {state}"
        if state != RESUMES:
            aside = set_aside(self.folder, [stage.name, f"{stage.name}.json"])
            if aside:
                line += f". The old result is in {aside}."
        say(line)
        self.execute_stage(stage, inputs, lock)

    def execute_stage(self, stage: Stage, inputs: dict[str, Any], lock: int | None) -> None:
        """Run a stage's process, which continues if its folder and record were not moved aside.

        Raises SystemExit with the process's exit status if the process fails.
        """
        record = self.record(stage)
        record["inputs"] = inputs
        folder = self.folder / stage.name
        folder.mkdir(exist_ok=True)
        file = self.folder / f"{stage.name}.json"
        write_atomically(file, json.dumps(record, indent=1))
        start = time.monotonic()
        status = None
        try:
            status = execute(self.words(stage), lock)
            if status == 0 and not self.has_result(stage.name):
                missing = self.result(stage.name)
                alert(f"{self.file}: stage {stage.name} did not write {missing}.")
                status = 1
        finally:
            record["seconds"] += time.monotonic() - start
            if status == 0:
                record["finished"] = time.time()
            self.finished[stage.name] = record["finished"]
            write_atomically(file, json.dumps(record, indent=1))
        self.report()
        if status:
            alert(
                f"{self.file}: stage {stage.name} failed with exit status {status}; see {folder}."
            )
            if status < 0:  # killed by a signal
                status = 128 - status
            raise SystemExit(status)

    def state(self, stage: Stage, inputs: Mapping[str, Any], record: Record) -> str:
        """Return a description of what the pipeline will do with a stage."""
        old = record["inputs"]
        if not old:
            return "runs"
        changed = [name for name in {**old, **inputs} if old.get(name) != inputs.get(name)]
        if changed:
            return f"runs again; changed: {', '.join(changed)}"
        if not record["finished"]:
            if stage.command:
                return RESUMES
            return "runs again; it did not finish"
        if not self.has_result(stage.name):
            return "runs again; its result is missing"
        return DONE

    def record(self, stage: Stage) -> Record:
        """Return the record of a stage."""
        path = self.folder / f"{stage.name}.json"
        if not path.exists():
            return Record(inputs={}, seconds=0.0, finished=None)
        record: Record = json.loads(path.read_text())
        for name, value in record["inputs"].items():
            record["inputs"][name] = hide(value)  # older releases stored secrets unmasked
        answers = self.result(stage.name)
        # Answer files are written atomically, so an existing file is always complete.
        # The process may have been killed before it recorded the end of the stage.
        if not record["finished"] and answers.is_file():
            record["finished"] = answers.stat().st_mtime
        return record

    def words(self, stage: Stage) -> list[str]:
        """Return the command line of a stage, which loads the newest checkpoint in its folder."""
        if stage.run:
            return shlex.split(self.filled(stage, stage.run))
        launcher = shlex.split(self.filled(stage, stage.launcher)) or [sys.executable, "-m"]
        flags = ["--config", str(self.write_flags(stage))]
        if any((self.folder / stage.name).glob("checkpoints/*")):
            flags.append("--ckpt.load_enable")
        return [*launcher, "openrlhf.cli.main", stage.command, *flags]

    def report(self) -> Path:
        """Write the report page for all stages that have run, and return its path."""
        seconds: dict[str, float] = {}
        for stage in self.stages:
            record = self.record(stage)
            if record["inputs"]:
                seconds[stage.name] = record["seconds"]
        return write_pipeline_report(self.folder, self.stages, seconds, title=self.file.stem)


def execute(words: Sequence[str], lock: int | None) -> int:
    """Run a program and return its exit status.

    If this process is terminated, the program is terminated first.
    """
    inherited = () if lock is None else (lock,)
    environment = {**os.environ, "PATH": search_path()}
    with subprocess.Popen(words, env=environment, pass_fds=inherited) as child:
        try:
            return child.wait()
        except BaseException:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C
                # the terminal has already sent Ctrl-C to the program
                if asked() == 128 + signal.SIGINT:
                    child.wait()
                else:
                    child.terminate()
                    child.wait(STAGE_END_TIMEOUT_S)
            child.kill()
            raise


def search_path() -> str:
    """Return the search path for programs, starting with the running Python's folder."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def content_of(place: Path) -> str:
    """Return a hash of a file, or of all files in a folder.

    For a file larger than 16 MiB, the hash covers its size, its modification time and samples of
    its content.
    """
    files = [place]
    if place.is_dir():
        files = sorted(place.rglob("*"))
    digest = sha256()
    for file in files:
        if file.is_file():
            stat = file.stat()
            size_and_time = ()
            if stat.st_size > HASH_BLOCK_BYTES * HASHED_BLOCKS:
                size_and_time = (stat.st_size, stat.st_mtime_ns)
            name = file.relative_to(place)
            digest.update(f"{name} {fingerprint(file)} {size_and_time}\n".encode())
    return digest.hexdigest()[:16]
