"""Terminal output of a run."""

import io
import json
import re
import time

import pytest

from openrlhf.observability.display import Display
from openrlhf.observability.lines import clock_time, compact, evaluation_line, step_line

RL_STEP = {
    "train/reward": 0.53,
    "train/kl": 0.002,
    "train/response_length": 118.4,
    "timing/tokens_per_second": 1900.0,
    "timing/step_total": 0.84,
    "timing/generation": 0.41,
    "timing/ppo_train": 0.38,
    "timing/broadcast": 0.05,
}


class Terminal(io.StringIO):
    """A stream that reports itself as an interactive terminal."""

    def isatty(self) -> bool:
        return True


def line_of(values: dict[str, float]) -> str:
    return step_line(12, 120, values, seconds_left=None).plain


def test_rl_step_is_one_line():
    line = step_line(12, 120, RL_STEP, seconds_left=83).plain
    assert " ".join(line.split()) == (
        "step 12/120 · reward 0.530 · kl 0.0020 · length 118 · 1.9k tokens/s · "
        "0.84 s (generate 0.41, train 0.38, publish 0.05) · 0:01:23 left"
    )


def test_supervised_step_shows_loss_and_learning_rate():
    """In distillation, the displayed loss is the minimized loss, not only its likelihood term."""
    losses = {"train/gpt_loss": 3.0, "train/distil_loss": 1.5, "train/loss_mean": 2.25}
    line = line_of(losses | {"train/lr": 1e-4, "train/grad_norm": 1.0})
    assert line == "step  12/120 · loss  2.250 · lr 1.0e-04"


def test_numbers_in_successive_steps_are_aligned():
    first, second = line_of(RL_STEP), line_of({**RL_STEP, "train/reward": -2.5, "train/kl": -0.1})
    assert [i for i, c in enumerate(first) if c == "·"] == [
        i for i, c in enumerate(second) if c == "·"
    ]


def test_failed_episodes_and_nonfinite_steps_are_shown_only_if_nonzero():
    assert "failed" not in line_of({**RL_STEP, "train/failed_episodes": 0})
    line = line_of({**RL_STEP, "train/failed_episodes": 3, "train/nonfinite_steps": 1})
    assert "3 failed episodes · 1 non-finite steps" in line


def test_large_fraction_of_truncated_episodes_is_shown() -> None:
    assert " · 62% truncated" in line_of({**RL_STEP, "train/truncated": 0.62})
    assert "truncated" not in line_of({**RL_STEP, "train/truncated": 0.05})


def test_failed_episodes_are_counted_by_kind():
    counts = {"train/failed_timeout": 2, "train/failed_exit": 1, "train/failed_episodes": 3}
    assert "3 failed episodes (1 exit, 2 timeout)" in line_of({**RL_STEP, **counts})


@pytest.mark.parametrize("width", [30, 50, 70, 100])
def test_narrow_terminal_crops_line_after_step_and_reward(width: int) -> None:
    out = Terminal()
    display = Display(out=out)
    display.console.width = width
    display.step(12, RL_STEP)
    (line,) = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert line.endswith("…") and len(line) <= width
    assert line.startswith("step 12/0 · reward  0.530")


def test_labels_are_dim_and_main_numbers_are_bold():
    line = step_line(12, 120, RL_STEP, seconds_left=None)
    styles = {line.plain[span.start : span.end].strip(): span.style for span in line.spans}
    assert line.style == ""
    assert (styles["reward"], styles["0.530"]) == ("dim", "bold")


def test_evaluation_line_shows_pass_at_k_first():
    values = {
        "eval/eval_num_samples": 1600.0,
        "eval/eval_truncated_rate": 0.02,
        "eval/eval_my_set_pass1": 0.4523,
        "eval/eval_my_set_pass4": 0.71,
    }
    line = evaluation_line(20, values).plain
    assert line == (
        "eval after step 20 · my_set pass@1 0.452 · my_set pass@4 0.710 · num samples 1.6k · "
        "truncated rate 2%"
    )


def test_evaluation_line_shows_standard_error_after_pass_at_one():
    values = {
        "eval/eval_a_score_stderr": 0.0123,
        "eval/eval_a_pass4": 0.71,
        "eval/eval_a_pass1": 0.4523,
    }
    line = evaluation_line(0, values).plain
    assert line == "eval after step 0 · a pass@4 0.710 · a pass@1 0.452 (± 0.012)"


def test_evaluation_line_omits_default_data_source():
    line = evaluation_line(2, {"eval/eval_default_pass1": 0.5, "eval/eval_gsm8k_pass1": 0.25})
    assert line.plain == "eval after step 2 · pass@1 0.500 · gsm8k pass@1 0.250"


def test_supervised_evaluation_line_shows_loss():
    line = evaluation_line(5, {"eval/eval gpt_loss": 0.5})
    assert line.plain == "eval after step 5 · gpt loss 0.500"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.53104, "0.531"),
        (-12.34, "-12.3"),
        (153.4, "153"),
        (1534.0, "1.5k"),
        (153_400.0, "153k"),
        (1.9e6, "1.9M"),
        (1e-6, "1.0e-06"),
        (5e12, "5.0e+12"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_compact_formats_numbers_in_few_characters(number, text):
    assert compact(number) == text


def test_clock_time_formats_durations():
    assert [clock_time(s) for s in (0, 59.6, 83, 3723)] == [
        "0:00:00",
        "0:01:00",
        "0:01:23",
        "1:02:03",
    ]


@pytest.mark.parametrize(("share", "text"), [(0.02, "2%"), (1.0, "100%"), (float("nan"), "nan%")])
def test_evaluation_rates_are_shown_as_percentages(share, text):
    line = evaluation_line(1, {"eval/eval_truncated_rate": share})
    assert line.plain.endswith(f"truncated rate {text}")


def test_display_is_live_only_on_terminal_without_quiet_or_json():
    assert Display(out=Terminal()).live
    assert not Display(out=io.StringIO()).live
    assert not Display(out=Terminal(), quiet=True).live
    assert not Display(out=Terminal(), json=True).live


def test_plain_output_has_one_line_per_step_with_remaining_time(monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = Display(out=out)
    display.begin(20, done=10)  # a run resumed after step 10
    now[0] = 3.0
    display.step(11, {**RL_STEP, "train/failed_episodes": 2})
    now[0] = 6.0
    display.step(12, RL_STEP)
    display.close()
    first, second = out.getvalue().splitlines()
    assert "0:00:27 left" in first
    assert "0:00:24 left" in second
    assert "\x1b" not in out.getvalue()


def test_live_output_shows_lines_and_bar_and_restores_cursor():
    out = Terminal()
    display = Display(out=out)
    display.console.width = 100
    display.begin(20)
    display.status("generating 512 episodes")
    display.step(1, RL_STEP)
    display.note("the gap grew")
    display.close()
    text = out.getvalue()
    assert "0.530" in text
    assert "1/20" in text
    assert "generating 512 episodes" in text
    assert "the gap grew" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is visible again


def test_begin_prints_a_note_only_if_all_steps_are_complete() -> None:
    for done, is_complete in ((20, True), (19, False)):
        out = io.StringIO()
        display = Display(out=out)
        display.begin(20, done=done)
        display.close()
        assert ("20" in out.getvalue()) == is_complete
        assert out.getvalue().count("\n") == int(is_complete)


def test_json_output_is_one_object_per_line(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    display = Display(json=True, out=out)
    display.note("hello")
    display.begin(2)
    display.step(1, {"train/reward": float("nan")})
    display.evaluation(1, {"eval/eval_loss": 0.5})
    note, step, evaluation = map(json.loads, out.getvalue().splitlines())
    assert note == {"event": "note", "text": "hello"}
    assert step == {
        "event": "step",
        "step": 1,
        "total_steps": 2,
        "seconds_left": 0.0,
        "train/reward": None,
    }
    assert evaluation == {"event": "evaluation", "step": 1, "eval/eval_loss": 0.5}
