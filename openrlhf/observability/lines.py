"""Terminal lines with the metrics of a step or an evaluation, and the formats of numbers.

Numbers have fixed widths, so that the lines of a run align in columns. The most important parts of
a line come first, because a narrow terminal crops its end.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from rich.text import Text

MIN_SHOWN_TRUNCATED = 0.1  # smaller fractions of truncated episodes are not shown
FAILED = "train/failed_"  # prefix of the metric for each failure kind
FAILED_EPISODES = f"{FAILED}episodes"


class ShownMetric(NamedTuple):
    """A number in a step's line: the first of `names` that was logged, formatted with `form`."""

    label: str
    names: Sequence[str]
    form: str = "{:6.3f}"
    style: str = ""


SHOWN_METRICS = (  # in the order of display
    ShownMetric("reward", ["train/reward", "rollout/reward_mean"], style="bold"),
    ShownMetric("loss", ["train/loss_mean", "train/loss"], style="bold"),
    ShownMetric("accuracy", ["train/acc"], "{:4.0%}", "bold"),
    ShownMetric("kl", ["train/kl"], "{:7.4f}"),
    ShownMetric("entropy", ["train/entropy_loss"]),
    ShownMetric("gap", ["train/logprob_gap_mean"], "{:.0e}"),
    ShownMetric("length", ["train/response_length", "rollout/response_length_mean"], "{:4.0f}"),
    ShownMetric("lr", ["train/lr"], "{:.1e}"),
)
SHOWN_STAGES = {  # stages shown in parentheses after a step's total duration
    "timing/generation": "generate",
    "timing/make_experience": "score",
    "timing/ppo_train": "train",
    "timing/broadcast": "publish",
}


def part(value: str, *, label: str = "", detail: str = "", style: str = "") -> Text:
    """Return one part of a line, formatted as `label value (detail)`."""
    pieces = [Text(label, "dim"), Text(value, style)]
    if detail:
        pieces.append(Text(f"({detail})", "dim"))
    return Text(" ").join(filter(None, pieces))


def join_parts(parts: Sequence[Text]) -> Text:
    """Join parts into a line."""
    return Text.assemble((" · ", "dim")).join(parts)


def step_line(
    step: int, total: int, values: Mapping[str, float], *, seconds_left: float | None
) -> Text:
    """Return the line of a training step, given its logged metrics."""
    parts = [part(f"{step:>{len(str(total))}}/{total}", label="step", style="bold")]
    for shown in SHOWN_METRICS:
        numbers = [values[name] for name in shown.names if name in values]
        if numbers:
            parts.append(part(shown.form.format(numbers[0]), label=shown.label, style=shown.style))
    speed = values.get("timing/tokens_per_second")
    if speed is not None:
        parts.append(part(f"{compact(speed):>5} tokens/s"))
    parts += _problem_parts(values)
    if "timing/step_total" in values:
        stages: list[str] = []
        for name, verb in SHOWN_STAGES.items():
            if name in values:
                stages.append(f"{verb} {values[name]:.2f}")
        parts.append(part(f"{values['timing/step_total']:>6.2f} s", detail=", ".join(stages)))
    if seconds_left is not None:
        parts.append(part(f"{clock_time(seconds_left)} left"))
    return join_parts(parts)


def _problem_parts(values: Mapping[str, float]) -> list[Text]:
    """Return the numbers of truncated episodes, failed episodes and skipped steps, if any."""
    parts: list[Text] = []
    truncated = values.get("train/truncated", 0)
    if truncated >= MIN_SHOWN_TRUNCATED:
        parts.append(part(f"{truncated:.0%} truncated", style="yellow"))
    failed = values.get(FAILED_EPISODES, 0)
    if failed > 0:
        kinds: list[str] = []
        for name in sorted(values):
            if name.startswith(FAILED) and name != FAILED_EPISODES:
                kinds.append(f"{values[name]:.0f} {name.removeprefix(FAILED)}")
        parts.append(part(f"{failed:.0f} failed episodes", detail=", ".join(kinds), style="red"))
    skipped = values.get("train/nonfinite_steps", 0)
    if skipped > 0:
        parts.append(part(f"{skipped:.0f} non-finite steps", style="red"))
    return parts


def evaluation_line(step: int, values: Mapping[str, float]) -> Text:
    """Return the line of an evaluation: all results, pass@k first.

    A data source's standard error is shown as a detail of its pass@1.
    """
    main: list[Text] = []
    more: list[Text] = []
    for name, value in values.items():
        if not name.startswith("eval/") or name.endswith("_score_stderr"):
            continue
        text = compact(value)
        if name.endswith("rate"):
            text = f"{value:.0%}"
        detail = ""
        error = values.get(f"{name.removesuffix('_pass1')}_score_stderr")
        if error is not None:
            detail = f"± {compact(error)}"
        label = evaluation_label(name)
        if "pass@" in label or "loss" in name:
            main.append(part(text, label=label, detail=detail, style="bold"))
        else:
            more.append(part(text, label=label))
    return join_parts([Text(f"eval after step {step}", "green"), *main, *more])


def evaluation_label(name: str) -> str:
    """Return a readable name for a metric, e.g. "gsm8k pass@4" for `eval/eval_gsm8k_pass4`.

    "default", the data source of rows that do not name a source, is omitted.
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
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if size >= unit:
            number /= unit
            suffix = letter
            break
    if abs(number) < 100:
        return f"{number:.1f}{suffix}"
    return f"{number:.0f}{suffix}"


def clock_time(seconds: float) -> str:
    """Format a duration as 0:01:23."""
    return str(timedelta(seconds=round(seconds)))
