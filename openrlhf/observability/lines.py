"""Terminal lines with the metrics of a step or an evaluation, and the number formats.

Numbers have fixed widths, so that the lines of a run align in columns. On a narrow terminal the
least important parts of a line are omitted.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

MIN_SHOWN_TRUNCATED = 0.1  # a smaller fraction of truncated episodes is not shown
FAILED = "train/failed_"  # prefix of a failure kind's metric
FAILED_EPISODES = f"{FAILED}episodes"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a line: `label value unit (detail)`.

    On a narrow terminal, the parts with the highest `rank` are omitted first.
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
        pieces = [Text(self.label, "dim"), Text(self.value, self.style), Text(self.unit)]
        if self.detail:
            pieces.append(Text(f"({self.detail})", "dim"))
        return Text(" ").join(filter(None, pieces))


@dataclass(frozen=True)
class ShownMetric:
    """A number in a step's line: the first of `names` that was logged, formatted with `form`."""

    label: str
    names: Sequence[str]
    form: str = "{:6.3f}"
    rank: int = 0
    unit: str = ""


SHOWN_METRICS = (  # in the order of display
    ShownMetric("reward", ["train/reward", "rollout/reward_mean"]),
    ShownMetric("loss", ["train/loss_mean", "train/loss"]),
    ShownMetric("accuracy", ["train/acc"], "{:4.0%}"),
    ShownMetric("kl", ["train/kl"], "{:7.4f}", rank=1),
    ShownMetric("entropy", ["train/entropy_loss"], rank=5),
    ShownMetric("gap", ["train/logprob_gap_mean"], "{:.0e}", rank=6),
    ShownMetric(
        "length", ["train/response_length", "rollout/response_length_mean"], "{:4.0f}", rank=3
    ),
    ShownMetric("lr", ["train/lr"], "{:.1e}", rank=4),
    ShownMetric("", ["timing/tokens_per_second"], "", rank=4, unit="tokens/s"),
)
SHOWN_STAGES = {  # shown in parentheses after a step's total duration
    "timing/generation": "generate",
    "timing/make_experience": "score",
    "timing/ppo_train": "train",
    "timing/broadcast": "publish",
}


def join_parts(parts: Sequence[Part], *, width: int | None = None) -> Text:
    """Join parts into a line.

    If the line is longer than `width` columns, details are omitted first, then the parts with the
    highest rank.
    """
    line = Text.assemble((" · ", "dim")).join(part.text for part in parts)
    if width is None or line.cell_len <= width:
        return line
    if any(part.detail for part in parts):
        without_details = [replace(part, detail="") for part in parts]
        return join_parts(without_details, width=width)
    least_important = max(range(len(parts)), key=lambda index: (parts[index].rank, index))
    if parts[least_important].rank == 0:
        return line
    return join_parts([*parts[:least_important], *parts[least_important + 1 :]], width=width)


def step_parts(
    step: int, total: int, values: Mapping[str, float], *, seconds_left: float | None
) -> list[Part]:
    """Return the parts of a training step's line, given its logged metrics."""
    digits = len(str(total))
    parts = [Part(label="step", value=f"{step:>{digits}}/{total}", style="bold")]
    parts += _metric_parts(values)
    if "timing/step_total" in values:
        parts.append(_time_part(values))
    if seconds_left is not None:
        parts.append(Part(value=clock_time(seconds_left), unit="left", rank=1))
    truncated = values.get("train/truncated", 0)
    if truncated >= MIN_SHOWN_TRUNCATED:
        parts.append(Part(value=f"{truncated:.0%}", unit="cut off", style="yellow"))
    if values.get(FAILED_EPISODES, 0) > 0:
        parts.append(_failures_part(values))
    nonfinite_steps = values.get("train/nonfinite_steps", 0)
    if nonfinite_steps > 0:
        parts.append(
            Part(value=f"{nonfinite_steps:.0f}", unit="steps not finite", style="bold red")
        )
    return parts


def _metric_parts(values: Mapping[str, float]) -> list[Part]:
    parts: list[Part] = []
    for shown in SHOWN_METRICS:
        numbers = [values[name] for name in shown.names if name in values]
        if not numbers:
            continue
        text = shown.form.format(numbers[0]) or f"{compact(numbers[0]):>5}"
        style = ""
        if shown.rank == 0:
            style = "bold"
        parts.append(
            Part(value=text, label=shown.label, unit=shown.unit, rank=shown.rank, style=style)
        )
    return parts


def _time_part(values: Mapping[str, float]) -> Part:
    """Return the step's duration, with the durations of its stages as detail."""
    stages: list[str] = []
    for name, verb in SHOWN_STAGES.items():
        if name in values:
            stages.append(f"{verb} {seconds(values[name])}")
    total = seconds(values["timing/step_total"])
    return Part(value=f"{total:>5}", unit="s", detail=", ".join(stages), rank=2)


def _failures_part(values: Mapping[str, float]) -> Part:
    """Return the number of failed episodes, with a count per failure kind."""
    kinds: list[str] = []
    for name in sorted(values):
        if name.startswith(FAILED) and name != FAILED_EPISODES:
            kinds.append(f"{values[name]:.0f} {name.removeprefix(FAILED)}")
    unit = "failed episodes"
    if kinds:
        unit += f" ({', '.join(kinds)})"
    return Part(value=f"{values[FAILED_EPISODES]:.0f}", unit=unit, style="bold red")


def evaluation_parts(step: int, values: Mapping[str, float]) -> list[Part]:
    """Return the parts of an evaluation's line: all results, pass@k first.

    A data source's standard error is shown as detail of its pass@1.
    """
    parts: list[Part] = []
    for name in values:
        if name.startswith("eval/") and not name.endswith("_score_stderr"):
            parts.append(_evaluation_part(name, values))
    parts.sort(key=lambda part: "pass@" not in part.label)
    return [Part(value="eval", unit=f"after step {step}", style="bold green"), *parts]


def _evaluation_part(name: str, values: Mapping[str, float]) -> Part:
    label = evaluation_label(name)
    text = compact(values[name])
    if name.endswith("rate"):
        text = f"{values[name]:.0%}"
    detail = ""
    error = values.get(f"{name.removesuffix('_pass1')}_score_stderr")
    if error is not None:
        detail = f"± {compact(error)}"
    if "pass@" in label or "loss" in name:
        return Part(label=label, value=text, detail=detail, style="bold")
    return Part(label=label, value=text, detail=detail, rank=1)


def evaluation_label(name: str) -> str:
    """Return a readable name for an evaluation metric: `eval/eval_gsm8k_pass4` is "gsm8k pass@4".

    "default", the data source of rows without one, is omitted.
    """
    label = re.sub(r"^eval/(eval[_ ])?(default_)?", "", name)
    found = re.fullmatch(r"(.*?)_?pass(\d+)", label)
    if not found:
        return label.replace("_", " ")
    return f"{found[1]} pass@{found[2]}".lstrip()


def compact(number: float) -> str:
    """Format a number in a few characters: 0.531, 12.3, 153, 1.5k, 1.9M, 1.0e-06."""
    size = abs(number)
    if size == 0 or not math.isfinite(number):
        return f"{number:.0f}"
    if not 1e-3 <= size < 1e9:
        return f"{number:.1e}"
    if size < 10:
        return f"{number:.3f}"
    suffix = ""
    if size >= 1e6:
        number /= 1e6
        suffix = "M"
    elif size >= 1e3:
        number /= 1e3
        suffix = "k"
    if abs(number) < 100:
        return f"{number:.1f}{suffix}"
    return f"{number:.0f}{suffix}"


def seconds(duration: float) -> str:
    """Format a duration in seconds, without the unit: 0.84, 12.3, 184."""
    if duration < 10:
        return f"{duration:.2f}"
    if duration < 100:
        return f"{duration:.1f}"
    return f"{duration:.0f}"


def clock_time(duration: float) -> str:
    """Format a duration in seconds as 1:23 or 2:01:23."""
    minutes, rest = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"
