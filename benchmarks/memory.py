"""Measures the memory of training processes, and compares it with the planner's predictions.

`python -m benchmarks.memory measure` measures the cases that have no record yet. With `report`
instead of `measure`, the command writes the page. `measure-gpu` measures a different set of cases
on one GPU, with records in a separate file. `fit` prints the values of the constants in
`openrlhf.planning.constants` that best fit the first half of the cases; the report lists the errors
for both halves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_roles import (
    SCALAR,
    SCORED,
    Case,
    deepspeed_flags,
    measure_case,
    measure_on_gpu,
)
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.planning.constants import CPU, Constants
from openrlhf.planning.memory import RoleMemory
from openrlhf.planning.model_files import read_shape
from openrlhf.planning.prediction import predict_role
from openrlhf.planning.roles import ModelRole, Pass
from openrlhf.planning.shapes import ModelShape
from openrlhf.planning.usage import Instant, Usage
from openrlhf.units import MIB
from tests.planning.models import QWEN2_390M
from tests.tiny import save_reward_model, save_tiny_model
from tests.verify.record import git
from tests.verify.results import packages

PAGE = Path("docs/results/memory.md")
RECORDS = Path("docs/results/memory.jsonl")
GPU_RECORDS = Path("runs/memory-gpu.jsonl")  # the page covers only CPUs
# Each model's architecture and sizes. The numbers in the names are millions of parameters.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", {}),
    "llama-1M": (
        "llama",
        {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    ),
    "llama-7M": (
        "llama",
        {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6},
    ),
    "llama-27M": (
        "llama",
        {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "llama-76M": (
        "llama",
        {
            "vocab_size": 8192,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 10,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
    ),
    "qwen2-17M": (
        "qwen2-tied",
        {
            "vocab_size": 16384,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
        },
    ),
    "qwen3-17M": (
        "qwen3",
        {
            "vocab_size": 16384,
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
        },
    ),
    "qwen2-390M": ("qwen2-tied", QWEN2_390M | {"max_position_embeddings": 4096}),
}
REAL = "SmolLM2-135M"  # must be copied to the models folder by hand
# The constants that `fit` changes.
FITTED = (
    "role_bytes",
    "rounded_bytes",
    "sharded_bytes",
)
INTRODUCTION = """\
Each case is one role of a run on a CPU, measured through the classes that a run uses. A peak is the
highest resident memory of a rank during an instant, minus its resident memory before it loads the
first model. Before that, the rank joins the process group and runs the same case with a model of
20,000 parameters, so that code and first-call caches do not count. Every process has one thread,
and glibc returns freed blocks of 64 KiB or more to the system at once (`M_MMAP_THRESHOLD`); with
its defaults, it keeps some of them, and a process is larger by up to 120 MiB. The cases are divided
by a hash of their names: the three constants (bytes of a role, of compiled bfloat16 kernels, and of
ZeRO 3) were chosen on one half of them, and the errors of both halves are shown. The formulas
themselves were corrected with both halves in view."""


def cases() -> list[Case]:
    """Return the cases, which differ from each other in only a few settings."""
    return [
        # the policy of an RL run
        Case(model="llama-7M", role="policy"),
        Case(model="llama-27M", role="policy"),
        Case(model="llama-27M", role="policy", zero=1),
        Case(model="llama-7M", role="policy", zero=2, ranks=2),
        Case(model="llama-7M", role="policy", zero=3, ranks=2),
        Case(model="llama-27M", role="policy", zero=1, dtype="bf16"),
        Case(model="llama-27M", role="policy", zero=2, ranks=2, dtype="bf16"),
        Case(model="llama-27M", role="policy", zero=3, ranks=2, dtype="bf16"),
        Case(model="llama-27M", role="policy", lora=8),
        Case(model="llama-7M", role="policy", checkpointing=True, length=512),
        Case(model="llama-7M", role="policy", packed=True, length=256),
        Case(model="llama-7M", role="policy", ema=True, zero=2, ranks=2),
        Case(model="llama-7M", role="policy", adam_offload=True, zero=2, ranks=2),
        Case(model="llama-7M", role="policy", tp=2, ranks=2),
        Case(model="llama-7M", role="policy", sp=2, ranks=2, packed=True, length=512),
        Case(model="llama-7M", role="policy", zero=2, ranks=4),
        Case(model="llama-7M", role="policy", zero=3, ranks=4),
        Case(model="llama-76M", role="policy", zero=1),
        Case(model="llama-27M", role="policy", zero=1, ranks=2),
        Case(model=REAL, role="policy", zero=1, dtype="bf16"),
        # the critic
        Case(model="llama-27M", role="critic"),
        Case(model="llama-27M", role="critic", zero=2, ranks=2, dtype="bf16"),
        Case(model="llama-7M", role="critic", length=512, rows=4),
        Case(model="llama-7M", role="critic", zero=3, ranks=2),
        # frozen models
        Case(model="llama-27M", role="reference"),
        Case(model="llama-76M", role="reference", dtype="bf16"),
        Case(model="llama-27M", role="reference", zero=3, ranks=2),
        Case(model=REAL, role="reference", packed=True, length=256),
        Case(model="llama-27M", role="reward"),
        Case(model="llama-76M", role="reward", rows=4, length=128),
        # offline tasks
        Case(model="llama-1M", role="sft", rows=8, length=256),
        Case(model="llama-7M", role="sft", length=1024),
        Case(model="llama-7M", role="sft", length=1024, checkpointing=True),
        Case(model="llama-7M", role="sft", zero=1, micro_batches=4),
        Case(model="llama-7M", role="sft", ranks=2),
        Case(model="llama-27M", role="sft", zero=3, ranks=2),
        Case(model="llama-7M", role="sft", tp=2, ranks=2, zero=1),
        Case(model="llama-7M", role="sft", sp=2, ranks=2, zero=2, packed=True, length=256),
        Case(model="llama-76M", role="sft"),
        Case(model="llama-27M", role="sft", zero=1, adam_offload=True),
        Case(model="qwen2-17M", role="sft", zero=1),
        Case(model="qwen3-17M", role="sft", zero=2, ranks=2),
        Case(model=REAL, role="sft", zero=1),
        Case(model="llama-27M", role="dpo"),
        Case(model="llama-7M", role="dpo", lora=8, packed=True, length=256),
        Case(model="llama-7M", role="dpo", zero=3, ranks=2),
        Case(model="llama-27M", role="rm", zero=1),
        Case(model="llama-7M", role="kto", zero=2, ranks=2),
        Case(model="llama-7M", role="kd", zero=1),
    ]


def gpu_cases() -> list[Case]:
    """Return the cases to measure on one GPU, the most important ones first."""
    large = Case(model="qwen2-390M", role="policy", dtype="bf16", rows=8, length=1024)
    return [
        large,
        replace(large, packed=True),
        replace(large, checkpointing=True),
        replace(large, role="critic"),
        replace(large, role="reference"),
        replace(large, role="sft", packed=True),
        replace(large, lora=8),
        replace(large, zero=1),
        replace(large, zero=2, role="sft", checkpointing=True, length=4096),
        replace(large, role="dpo", rows=4),
        replace(large, role="sft", dtype="fp32"),
        replace(large, role="rm"),
        replace(large, role="kd", rows=4),
        replace(large, zero=3, role="sft"),
        Case(model=REAL, role="policy", dtype="bf16", rows=16, length=512),
        Case(model=REAL, role="sft", dtype="bf16", rows=16, length=512, packed=True),
    ]


def measure_gpu(records: Path, models: Path) -> None:
    """Measure the cases for one GPU, each in a new process.

    If a case fails, the remaining cases are still measured.
    """
    wanted = [case for case in gpu_cases() if case not in read_records(records)]
    available = [case for case in wanted if case.model in MODELS or (models / case.model).exists()]
    make_models(models, available)
    for case in available:
        words = [sys.executable, "-m", "benchmarks.memory", "measure-gpu", "--case", case.name]
        places = ["--models", str(models), "--records", str(records)]
        subprocess.run([*words, *places], check=False)


def measure_gpu_case(case: Case, records: Path, models: Path) -> None:
    """Measure a case in this process, and append its record."""
    begun = time.monotonic()
    record = measure_on_gpu(case, models)
    print(f"{case.name}: {time.monotonic() - begun:.0f} s", flush=True)
    add_record(records, record, torch.cuda.get_device_name())


def add_record(records: Path, record: Mapping[str, Any], machine: str) -> None:
    """Append a measurement to a file, with the commit, the date and the machine."""
    complete = {
        **record,
        "commit": git("rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
    }
    records.parent.mkdir(parents=True, exist_ok=True)
    with records.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(complete) + "\n")


def is_fitted(case: Case) -> bool:
    """Return whether the case belongs to the half to which the constants are fitted."""
    return hashlib.sha256(case.name.encode()).digest()[0] % 2 == 0


def make_models(folder: Path, wanted: Iterable[Case]) -> None:
    """Create the models for the cases, unless they exist.

    Raises FileNotFoundError if the real model is missing.
    """
    for case in wanted:
        for name in ("tiny", case.model):
            path = folder / name
            if name in MODELS and not path.exists():
                kind, sizes = MODELS[name]
                save_tiny_model(path, kind, **sizes)
            elif not path.exists():
                raise FileNotFoundError(f"Run python examples/real_model/fetch.py {path} first.")
            scored = folder / f"{name}{SCORED}"
            if case.role in SCALAR and not scored.exists():
                save_reward_model(scored, path)


# ---- predictions


def roles_of(case: Case, shape: ModelShape) -> list[ModelRole]:
    """Return the planner's roles for the models in one rank's process."""
    rows = case.rows
    if case.role in ("dpo", "rm"):
        rows *= 2
    tokens = rows * case.length
    prompt = case.length // 4
    scored = rows * (case.length - prompt)
    is_scalar = case.role in ("critic", "reward", "rm")
    if is_scalar:
        shape = shape.as_scalar()
        scored = tokens
    batch = Pass(
        tokens=-(-tokens // case.sp),
        longest=case.length,
        scored=-(-scored // case.sp),
        packed=case.packed,
    )
    model = ModelRole(
        name=case.role,
        shape=shape,
        dtype=case.dtype,
        dp=case.ranks // (case.tp * case.sp),
        tp=case.tp,
        sp=case.sp,
        zero_stage=zero_stage(case),
    )
    frozen = replace(model, zero_stage=3 if case.zero == 3 else 0, scoring=batch)
    if case.role in ("reference", "reward"):
        return [frozen]
    teacher_bytes = 0
    if case.role == "kd":
        teacher_bytes = model.width * batch.scored * shape.hidden
    trained = replace(
        model,
        trained=True,
        adam_offload=case.adam_offload,
        lora_rank=case.lora,
        ema=case.ema,
        gradient_checkpointing=case.checkpointing,
        keeps_logits=case.role == "kd",
        teacher_logits=case.role == "kd",
        teacher_bytes=teacher_bytes,
        training=batch,
        window=case.micro_batches,
        publishes=case.role == "policy",
    )
    if case.role in ("policy", "critic") or (case.lora and case.role == "dpo"):
        return [replace(trained, scoring=batch)]
    if case.role == "kd":  # the student's passes compute the teacher's logits
        return [trained, replace(frozen, scoring=replace(batch, scored=0))]
    if case.role in ("dpo", "kto"):
        return [trained, frozen]
    return [trained]


def zero_stage(case: Case) -> int:
    """Return the effective ZeRO stage."""
    return DeepSpeedConfig(**deepspeed_flags(case)).trained_stage(case.ranks)


def predicted(case: Case, shape: ModelShape, constants: Constants) -> dict[Instant, Usage]:
    """Return the predicted memory of the process at each instant.

    Models are loaded one after another, checked once all of them are loaded, and then used one at a
    time.
    """
    memories = [RoleMemory(role, constants) for role in roles_of(case, shape)]
    usages = [predict_role(memory.role, constants) for memory in memories]
    shared = Usage(framework=-constants.role_bytes)  # counted only for the first model of a process
    peaks: dict[Instant, Usage] = {}
    for instant in Instant:
        candidates: list[Usage] = []
        for active, usage in enumerate(usages):
            others = list(range(len(usages)))
            others.remove(active)
            if instant == Instant.LOAD:
                rest = [memories[number].idle_before_first_step() + shared for number in others]
                candidates.append(sum(rest[:active], usage[instant]))
                candidates.append(sum(rest, memories[active].proof_peak()))
            else:
                rest = [usages[number][Instant.IDLE] + shared for number in others]
                candidates.append(sum(rest, usage[instant]))
        peaks[instant] = max(candidates, key=lambda usage: usage.total)
    return peaks


# ---- comparison


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case's measured and predicted memory at one instant."""

    case: Case
    instant: Instant
    measured: int  # the largest value of any rank, in bytes
    predicted: int  # bytes
    state: int  # predicted bytes of weights, gradients and optimizer state

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1


def read_records(path: Path) -> dict[Case, dict[str, Any]]:
    """Return the newest record of each case."""
    records: dict[Case, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            records[Case(**record["case"])] = record
    return records


def compare(
    records: Mapping[Case, dict[str, Any]], models: Path, constants: Constants
) -> list[Row]:
    """Return a row for each instant of each measured case."""
    rows: list[Row] = []
    shapes: dict[str, ModelShape] = {}
    for case, record in records.items():
        if case.model not in shapes:
            shapes[case.model] = read_shape(str(models / case.model))
        found = predicted(case, shapes[case.model], constants)
        for name in record["ranks"][0]["peaks"]:
            instant = Instant(name)
            rows.append(
                Row(
                    case=case,
                    instant=instant,
                    measured=max(rank["peaks"][name] for rank in record["ranks"]),
                    predicted=found[instant].total,
                    state=found[instant].weights
                    + found[instant].gradients
                    + found[instant].optimizer,
                )
            )
    return rows


def fit(records: Mapping[Case, dict[str, Any]], models: Path) -> Constants:
    """Return the constants with the smallest mean error on the first half of the cases.

    Multiplies or divides one constant at a time by a factor, as long as this reduces the error.
    """
    half = {case: record for case, record in records.items() if is_fitted(case)}
    best = CPU
    lowest = mean_error(compare(half, models, best))
    factor = 2.0
    while factor > 1.005:
        improved = False
        for name in FITTED:
            for scale in (factor, 1 / factor):
                value = getattr(best, name) * scale
                trial = replace(best, **{name: type(getattr(best, name))(value)})
                error = mean_error(compare(half, models, trial))
                if error < lowest:
                    best, lowest, improved = trial, error, True
        if not improved:
            factor = factor**0.5
    return best


def mean_error(rows: list[Row]) -> float:
    """Return the mean absolute error."""
    return statistics.fmean(abs(row.error) for row in rows)


# ---- page


def write_page(rows: list[Row], records: Mapping[Case, dict[str, Any]]) -> None:
    """Write the page, which lists every row."""
    held_out = [row for row in rows if not is_fitted(row.case)]
    fitted = [row for row in rows if is_fitted(row.case)]
    peaks = [peak_of(rows, case) for case in records]
    stateful = [row for row in peaks if row.state > row.measured / 2]
    dates = sorted({record["date"] for record in records.values()})
    period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = sorted({record["commit"] for record in records.values()})
    machines = sorted({record["machine"] for record in records.values()})
    lines = [
        "# Predicted and measured memory",
        "",
        f"`python -m benchmarks.memory measure`, then `report`: measured {period} "
        f"at {', '.join(commits)}, {packages()}, {'; '.join(machines)}.",
        "",
        INTRODUCTION,
        "",
        f"{len(records)} cases, {len(rows)} peaks. In {len(stateful)} cases, weights, gradients "
        "and optimizer state are more than half of the highest peak.",
        "",
        "| half | peaks | median error | 90 % | worst | above 10 % |",
        "| --- | --- | --- | --- | --- | --- |",
        summary("fitted", fitted),
        summary("held out", held_out),
        summary("held out, highest peak of each case", [r for r in peaks if r in held_out]),
        "",
        f"Not measured yet: {len(cases()) - len(records)} of {len(cases())} cases. For "
        "measurements on a GPU, see [On GPUs](../gpu.md#memory).",
        "",
        "| case | instant | predicted, MiB | measured, MiB | error | half |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        half = "fitted" if is_fitted(row.case) else "held out"
        cells = (
            row.case.name,
            row.instant,
            f"{row.predicted / MIB:.1f}",
            f"{row.measured / MIB:.1f}",
            f"{row.error:+.1%}",
            half,
        )
        lines.append("| " + " | ".join(cells) + " |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def peak_of(rows: list[Row], case: Case) -> Row:
    """Return the row of the case's highest measured peak."""
    return max((row for row in rows if row.case == case), key=lambda row: row.measured)


def summary(name: str, rows: list[Row]) -> str:
    """Return a table row that summarizes the errors of `rows`."""
    errors = sorted(abs(row.error) for row in rows)
    ninth = errors[int(0.9 * (len(errors) - 1))]
    above = sum(error > 0.1 for error in errors)
    median = statistics.median(errors)
    return f"| {name} | {len(rows)} | {median:.1%} | {ninth:.1%} | {errors[-1]:.1%} | {above} |"


def cpu_machine() -> str:
    """Return the names of the processor and the kernel."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = processor[1] if processor else platform.processor()
    return f"{name}, Linux {platform.release()}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "measure-gpu", "fit", "report"))
    parser.add_argument("--models", type=Path, default=Path("/tmp/memory-models"))
    parser.add_argument("--records", type=Path, help=f"default: {RECORDS} or {GPU_RECORDS}")
    parser.add_argument("--case", nargs="+", help="Measure only the cases with these names.")
    options = parser.parse_args()
    on_gpu = options.action == "measure-gpu"
    if options.records is None:
        options.records = GPU_RECORDS if on_gpu else RECORDS
    known = {case.name for case in (gpu_cases() if on_gpu else cases())}
    unknown = sorted(set(options.case or ()) - known)
    if unknown:
        parser.error(f"unknown cases {unknown}: use one of {sorted(known)}")
    records = read_records(options.records)
    if options.action == "fit":
        print(fit(records, options.models))
    elif on_gpu and options.case:
        for case in gpu_cases():
            if case.name in options.case:
                measure_gpu_case(case, options.records, options.models)
    elif on_gpu:
        measure_gpu(options.records, options.models)
    elif options.action == "report":
        write_page(compare(records, options.models, CPU), records)
    else:
        torch.set_num_threads(1)
        wanted: list[Case] = []
        for case in cases():
            if case not in records and (not options.case or case.name in options.case):
                wanted.append(case)
        make_models(options.models, wanted)
        for case in wanted:
            if case in read_records(options.records):  # another process has measured it
                continue
            begun = time.monotonic()
            record = measure_case(case, options.models)
            print(f"{case.name}: {time.monotonic() - begun:.0f} s", flush=True)
            if record:
                add_record(options.records, record, cpu_machine())


if __name__ == "__main__":
    main()
