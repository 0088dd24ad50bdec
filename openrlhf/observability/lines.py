"""The line of a step: which metrics it shows, how numbers are written, and what a narrow terminal
leaves out first.

Numbers have fixed widths, so that the lines of a run read as columns.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from openrlhf.config.flags import toml_beside

MANY_TRUNCATED = 0.1  # a larger share of episodes that ran out of tokens is on the line


@dataclass(frozen=True, kw_only=True)
class Part:
    """One piece of a line: `label value unit (detail)`. A narrow terminal leaves out the highest
    `rank` first.
    """

    value: str = ""
    label: str = ""
    unit: str = ""
    detail: str = ""
    rank: int = 0
    style: str = ""

    @property
    def text(self) -> Text:
        """Label, value, unit and detail, separated by spaces."""
        detail = f"({self.detail})" if self.detail else ""
        pieces = (self.label, "dim"), (self.value, self.style), (self.unit, ""), (detail, "dim")
        return Text(" ").join(Text(text, style) for text, style in pieces if text)


def join_parts(parts: Sequence[Part], *, width: int | None = None) -> Text:
    """The line. If it is longer than `width` columns, details are left out first, then the parts
    with the highest rank.
    """
    line = Text()
    for index, part in enumerate(parts):
        line.append(" · " if index else "", "dim").append_text(part.text)
    if width is None or line.cell_len <= width:
        return line
    if any(part.detail for part in parts):
        return join_parts([replace(part, detail="") for part in parts], width=width)
    leaves = max(range(len(parts)), key=lambda index: (parts[index].rank, index))
    if parts[leaves].rank == 0:
        return line
    return join_parts([*parts[:leaves], *parts[leaves + 1 :]], width=width)


def step_parts(
    step: int, total: int, values: Mapping[str, float], *, seconds_left: float | None
) -> list[Part]:
    """The pieces of a training step's line, from the metrics that were logged."""
    parts = [Part(label="step", value=f"{step:>{len(str(total))}}/{total}", style="bold")]
    for shown in _TABLES["shown"]:
        number = next((values[name] for name in shown["metrics"] if name in values), None)
        if number is not None:
            written = shown["form"].format(number) if "form" in shown else f"{compact(number):>5}"
            look = {key: shown[key] for key in ("label", "unit", "rank") if key in shown}
            parts.append(Part(value=written, style="" if "rank" in shown else "bold", **look))
    if "timing/step_total" in values:
        spent = [
            f"{say} {seconds(values[name])}"
            for name, say in _TABLES["spent"].items()
            if name in values
        ]
        time = seconds(values["timing/step_total"])
        parts.append(Part(value=f"{time:>5}", unit="s", detail=", ".join(spent), rank=2))
    if seconds_left is not None:
        parts.append(Part(value=clock_time(seconds_left), unit="left", rank=1))
    if values.get("train/truncated", 0) >= MANY_TRUNCATED:
        parts.append(Part(value=f"{values['train/truncated']:.0%}", unit="cut off", style="yellow"))
    kinds = {
        name: f"{number:.0f} {name.removeprefix(_FAILED)}"
        for name, number in values.items()
        if _FAILED in name
    }
    if values.get(_EPISODES, 0) > 0:
        of_kinds = ", ".join(words for name, words in sorted(kinds.items()) if name != _EPISODES)
        unit = "failed episodes" + (f" ({of_kinds})" if of_kinds else "")
        parts.append(Part(value=f"{values[_EPISODES]:.0f}", unit=unit, style="bold red"))
    if values.get(_NONFINITE, 0) > 0:
        parts.append(
            Part(value=f"{values[_NONFINITE]:.0f}", unit="steps not finite", style="bold red")
        )
    return parts


def evaluation_parts(step: int, values: Mapping[str, float]) -> list[Part]:
    """The pieces of an evaluation's line: all its results, pass@k first. A standard error stands
    behind its pass@1.
    """
    parts = [Part(value="eval", unit=f"after step {step}", style="bold green")]
    shown = [
        name for name in values if name.startswith("eval/") and not name.endswith("_score_stderr")
    ]
    for name in sorted(shown, key=lambda name: "pass@" not in evaluation_label(name)):
        label = evaluation_label(name)
        write = percent if name.endswith("rate") else compact
        style, rank = ("bold", 0) if "pass@" in label or "loss" in name else ("", 1)
        error = values.get(f"{name.removesuffix('_pass1')}_score_stderr")
        detail = "" if error is None else f"± {compact(error)}"
        parts.append(
            Part(
                label=label,
                value=write(values[name]).strip(),
                detail=detail,
                rank=rank,
                style=style,
            )
        )
    return parts


def evaluation_label(name: str) -> str:
    """A metric's name for people: `eval/eval_gsm8k_pass4` is "gsm8k pass@4". "default", the rows
    without a data source, is left out.
    """
    label = re.sub(r"^eval/(eval[_ ])?(default_)?", "", name)
    found = re.fullmatch(r"(.*?)_?pass(\d+)", label)
    return f"{found[1]} pass@{found[2]}".lstrip() if found else label.replace("_", " ")


def compact(number: float) -> str:
    """A number in a few characters: 0.531, 12.3, 153, 1.5k, 1.9M, 1.0e-06."""
    size = abs(number)
    if size == 0 or not math.isfinite(number):
        return f"{number:.0f}"
    if not 1e-3 <= size < 1e9:
        return f"{number:.1e}"
    scale, suffix = (1e6, "M") if size >= 1e6 else (1e3, "k") if size >= 1e3 else (1, "")
    digits = 3 if size < 10 else 1 if size / scale < 100 else 0
    return f"{number / scale:.{digits}f}{suffix}"


def percent(share: float) -> str:
    """A share as "  2%": wide enough for 100%, so that shares of several lines are aligned."""
    return f"{100 * share:3.0f}%" if math.isfinite(share) else str(share)


def seconds(duration: float) -> str:
    """A duration in seconds, without unit: 0.84, 12.3, 184."""
    digits = 2 if duration < 10 else 1 if duration < 100 else 0
    return f"{duration:.{digits}f}"


def clock_time(duration: float) -> str:
    """A duration as 1:23 or 2:01:23."""
    minutes, rest = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_TABLES = toml_beside(__file__)
_FAILED = "train/failed_"
_EPISODES, _NONFINITE = f"{_FAILED}episodes", "train/nonfinite_steps"
