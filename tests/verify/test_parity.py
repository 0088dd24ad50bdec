"""Tests that training in any layout equals training in one process.

docs/results/parity.md lists the worst errors, and docs/results/parity.jsonl lists the errors of
every case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.ranks import ROOT
from tests.trainers.parity import Case, Errors, compare, is_equal
from tests.verify.results import FOLDER, versions, write_result

pytestmark = pytest.mark.verify
RECORDS = FOLDER / "parity.jsonl"
# (number of ranks, ring size, tensor-parallel size)
LAYOUTS = {
    "DP2": (2, 1, 1),
    "SP2": (2, 2, 1),
    "TP2": (2, 1, 2),
    "SP4": (4, 4, 1),
    "DP2xSP2": (4, 2, 1),
    "DP2xTP2": (4, 1, 2),
    "TP2xSP2": (4, 2, 2),
    "DP2xTP2xSP2": (8, 2, 2),
}
MODELS = ("llama", "qwen3", "gemma3", "mistral-windowed", "mixtral", "qwen3-moe")
TASKS = ("dpo", "rm", "kto", "kd", "kd_top", "prm_hard", "prm_soft")
STAGES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The errors of one case."""

    layout: str
    settings: str
    zero: int
    loss: float
    gradient: float
    weights: float
    versions: str


def cases_of(layout: str) -> list[Case]:
    """Return all models with all stages, and other settings with some models and stages."""
    ranks, sp, tp = LAYOUTS[layout]

    def case(model: str, zero: int, **settings: str | bool) -> Case:
        return Case(model=model, ranks=ranks, sp=sp, tp=tp, zero=zero, **settings)  # pyright: ignore[reportArgumentType]

    cases = [case(model, zero) for model, zero in product(MODELS, STAGES)]
    for number, task in enumerate(TASKS):
        cases.append(case("llama", 2 + number % 2, task=task))
    for zero in STAGES:
        cases.append(case("llama", zero, lora=True))
        cases.append(case("llama", zero, checkpointing=True))
        if sp == 1:
            cases.append(case("llama", zero, packed=False))
    cases += [
        case("llama-odd", 1),
        case("llama-odd", 3),
        case("qwen3", 2, lora=True),
        case("qwen3", 2, checkpointing=True),
        case("qwen3", 3, lora=True, checkpointing=True),
        case("llama", 2, optim="adam"),
        case("qwen3", 1, optim="adam"),
    ]
    return cases


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_in_a_layout_equals_training_in_one_process(layout: str, tmp_path: Path) -> None:
    # The ranks must be forked before any thread is started, hence the separate process.
    out = tmp_path / "errors.json"
    command = [sys.executable, "-m", "tests.verify.test_parity", layout, str(tmp_path), str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    cases = cases_of(layout)
    compared: list[Errors | str] = []
    for found in json.loads(out.read_text()):
        compared.append(found if isinstance(found, str) else Errors(**found))
    record(layout, zip(cases, compared, strict=True))
    for case, errors in zip(cases, compared, strict=True):
        if case.optim == "sgd":  # AdamW amplifies rounding to a few % of the learning rate
            assert is_equal(errors), (case, errors)


def record(layout: str, compared: Iterable[tuple[Case, Errors | str]]) -> None:
    """Record the errors of a layout's cases, replace earlier records, and write the page."""
    records = [each for each in read_records() if each.layout != layout]
    for case, errors in compared:
        if isinstance(errors, str):
            continue
        records.append(
            Record(
                layout=layout,
                settings=case.settings,
                zero=case.zero,
                versions=versions(),
                **asdict(errors),
            )
        )
    records.sort(key=lambda each: (list(LAYOUTS).index(each.layout), each.settings, each.zero))
    RECORDS.write_text("".join(json.dumps(asdict(each)) + "\n" for each in records))
    write_page(records)


def read_records() -> list[Record]:
    """Return the recorded errors."""
    if not RECORDS.exists():
        return []
    return [Record(**json.loads(line)) for line in RECORDS.read_text().splitlines()]


def write_page(records: list[Record]) -> None:
    """Write the page with the worst errors of each layout, and of each setting in each layout."""
    by_layout: defaultdict[str, list[Record]] = defaultdict(list)
    by_settings: defaultdict[str, defaultdict[str, list[Record]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in records:
        by_layout[each.layout].append(each)
        by_settings[each.settings][each.layout].append(each)
    rows: list[tuple[str, ...]] = []
    for layout, found in by_layout.items():
        steady = [each for each in found if "AdamW" not in each.settings]
        adam = [each for each in found if "AdamW" in each.settings]
        rows.append(
            (
                layout,
                str(len(found)),
                *(worst(steady, name) for name in ("loss", "gradient", "weights")),
                worst(adam, "weights"),
            )
        )
    layouts = list(by_layout)
    detail = [["model, task, settings", *layouts], ["---"] * (1 + len(layouts))]
    for settings, found in by_settings.items():
        cells = [settings]
        for layout in layouts:
            pair = [worst(found[layout], name) for name in ("gradient", "weights")]
            cells.append(" / ".join(pair) if found[layout] else "")
        detail.append(cells)
    notes = [
        "Three steps in float32, compared with the same steps of one process: the largest "
        "difference of a loss, the relative difference of the first gradient, and the largest "
        "difference of a weight after the last step. Bounds: 2e-6, 1e-5 and 1e-6. Steps are plain "
        "gradient descent, except where AdamW is named: it divides by the root of the second "
        "moment, which amplifies rounding where gradients are nearly 0.",
        "",
        "DP: ranks that divide the data; TP: ranks that split layers; SP: ranks that share "
        "sequences. All models run with ZeRO 1, 2 and 3; the tables show the worst stage. "
        "`llama-odd` has sizes of the vocabulary and the MLP that no number of ranks divides.",
        "",
        "## Each setting: gradient / weights",
        "",
        *("| " + " | ".join(row) + " |" for row in detail),
    ]
    write_result(
        "parity",
        "Layouts of ranks compared with one process",
        "python -m pytest -m verify tests/verify/test_parity.py",
        ("layout", "cases", "loss", "gradient (relative)", "weights", "weights with AdamW"),
        rows,
        "\n".join(notes),
    )


def worst(records: list[Record], name: str) -> str:
    """Return the largest value of a field, or an empty string if there are no records."""
    if not records:
        return ""
    return f"{max(getattr(each, name) for each in records):.1e}"


def main() -> None:
    """Compare all cases of a layout, and write the errors to a file."""
    torch.set_num_threads(1)
    layout, folder, out = sys.argv[1:]
    cases = cases_of(layout)
    compared = compare(cases, Path(folder))
    found = [compared[case] for case in cases]
    Path(out).write_text(json.dumps([e if isinstance(e, str) else asdict(e) for e in found]))


if __name__ == "__main__":
    main()
