"""The report page: its contents, and the escaping of text from users and models."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from openrlhf.observability import report
from openrlhf.observability.report import (
    compare,
    main_numbers,
    read_samples,
    read_series,
    read_stage,
    report_run,
    short_label,
    write_report,
)
from openrlhf.observability.run_folder import TEXTS, RunFolder

SAMPLE = {
    "step": 1,
    "prompt_index": 0,
    "sample_index": 0,
    "prompt": "2+2=",
    "response": "5",
    "reward": 0.0,
    "stop_reason": "stop",
}


class Page(HTMLParser):
    """The elements and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "grpo")
    folder.write_config("", "algo:\n  kl:\n    init_coef: 0.01\n")
    for step in range(1, 41):
        folder.log_metrics(step, {"train/reward": step / 40, "train/my_number": 1.0})
    folder.log_metrics(40, {"eval/eval_gsm8k_pass1": 0.5})
    folder.log_samples([SAMPLE, SAMPLE | dict(step=40, response="4", reward=1.0)])
    return folder


def test_page_shows_training_texts_verbatim(run):
    assert "⟦" not in page_of(report_run(run.path)).text
    run.write_lines(TEXTS, ["--- chosen 1: 4 tokens", "2+2=⟦<b>4</b>⟧"])
    assert "--- chosen 1: 4 tokens 2+2=⟦<b>4</b>⟧" in page_of(report_run(run.path)).text


def page_of(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_page_shows_curves_metrics_config_and_samples(run):
    page = page_of(report_run(run.path))
    assert page.count("figure") == 3  # reward, pass@1, and a user-defined metric
    assert "steps: 40" in page.text
    assert "gsm8k pass@1" in page.text
    assert "init_coef: 0.01" in page.text
    assert "step 1 · reward 0 · ended by stop 2+2= 5" in page.text
    assert "step 40 · reward 1.000 · ended by stop 2+2= 4" in page.text


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (
            "actor: {model_name_or_path: gpt2}\ndata: {prompt_dataset: a.jsonl}\n"
            "algo: {advantage: {estimator: rloo}}\n",
            "advantages rloo · model gpt2 · data a.jsonl",
        ),
        ("model: {model_name_or_path: gpt2}\ndata: {dataset: b.csv}\n", "model gpt2 · data b.csv"),
        ("model: gpt2\ndata:\n", None),
        ("no: {yaml", None),
    ],
)
def test_page_shows_model_and_data_below_title(tmp_path, config: str, settings: str | None):
    folder = RunFolder(tmp_path / "run")
    folder.write_config("", config)
    text = page_of(report_run(folder.path)).text
    if settings is None:
        assert read_stage(folder.path).settings == []
    else:
        assert text.index("run generated") < text.index(settings) < text.index("No metrics")


def test_page_shows_command_line_and_startup_notices_before_charts(run) -> None:
    start = ["openrlhf sft", "Few rows.\nAdd some."]
    run.write_config("model:\n  name: gpt2\ntrain:\n  seed: 1\n", "", start)
    text = page_of(report_run(run.path)).text
    assert "openrlhf sft --model.name gpt2 --train.seed 1" in text
    assert text.index("Few rows.") < text.index("Add some.") < text.index("Pass rate")


def test_page_does_not_reference_other_files(run):
    page = page_of(report_run(run.path))
    links = [a for _, attrs in page.tags for a in (attrs.get("src"), attrs.get("href")) if a]
    assert all(link.startswith("#") for link in links)
    assert page.count("link") == 0
    assert "url(" not in (run.path / "report.html").read_text()


def test_page_escapes_model_and_user_text(run):
    attack = "</pre><script>alert(1)</script><img src=x>{{ 7*7 }}"
    run.log_samples([SAMPLE | dict(step=41, prompt=attack, response=attack)])
    run.log_samples([SAMPLE | dict(step=41, error=attack, reward=None)])
    run.log_metrics(41, {f"train/{attack}": 1.0})
    run.log_metrics(42, {f"train/{attack}": 2.0})
    run.write_config("", attack)
    path = write_report(
        run.path / "r.html", {attack: run.path}, title=attack, tables=[[[attack], [attack]]]
    )
    page = page_of(path)
    assert page.count("script") == 1  # the page's own
    assert page.count("img") == 0
    assert "{{ 7*7 }}" in page.text


def test_page_for_several_stages_has_a_table_and_links(run, tmp_path):
    path = write_report(
        tmp_path / "deep" / "report.html",
        {"Supervised": tmp_path / "nothing", "RL": run.path},
        title="From nothing",
        tables=[[["", "before", "after"], ["pass@1", 0.41, None]]],
    )
    page = page_of(path)
    assert page.count("section") == 2
    assert [a["href"] for tag, a in page.tags if tag == "a"] == ["#stage-0", "#stage-1"]
    assert "before after pass@1 0.410 –" in page.text
    assert "No metrics were logged in this folder." in page.text


def test_page_contains_data_of_every_chart(run):
    page = page_of(report_run(run.path))
    charts = [json.loads(attrs["data-lines"] or "") for tag, attrs in page.tags if tag == "figure"]
    assert charts[0] == [["gsm8k pass@1", 0, False, [40], [0.5]]]
    assert [len(steps) for (_, _, _, steps, _), *_ in charts] == [1, 40, 40]


def test_page_shows_first_and_last_value_of_every_chart_without_javascript(run):
    page = page_of(report_run(run.path))
    assert page.count("noscript") == 3
    assert "reward 0.025 → 1.000" in page.text


def test_page_for_an_empty_run_has_no_charts(tmp_path):
    RunFolder(tmp_path)
    page = page_of(report_run(tmp_path))
    assert "No metrics were logged" in page.text
    assert page.count("figure") == 0


def test_page_for_a_long_run_has_a_bounded_size(tmp_path):
    folder = RunFolder(tmp_path)
    names = [f"train/number_{i}" for i in range(5)]
    for step in range(8000):
        folder.log_metrics(step, {name: math.sin(step) for name in names})
    assert report_run(tmp_path).stat().st_size < 300_000


def test_read_series_merges_lines_of_a_step_and_keeps_later_value():
    rows = [
        {"step": 2, "time": 1.0, "train/kl": 1.0},
        {"step": 1, "time": 0.0, "train/kl": 3.0, "eval/eval_loss": None},
        {"step": 2, "time": 2.0, "train/kl": 2.0},
        {"step": 3, "time": 2.0, "train/kl": 1e300},
    ]
    assert read_series(rows) == {"train/kl": [(1, 3.0), (2, 2.0)]}


def sample(step, prompt, response="", **fields):
    return {"step": step, "prompt": prompt, "response": response, **fields}


def responses(samples):
    return [(x and x["response"], y and y["response"]) for x, y in samples.pairs]


def test_read_samples_pairs_first_and_newest_sample_of_evaluation_prompts():
    rows = [
        sample(0, "held out", "h0", evaluation=True),
        sample(1, "a", "a1"),
        sample(20, "held out", "h20", evaluation=True),
        sample(40, "a", "a40"),
        sample(40, "held out", "h40", evaluation=True),
    ]
    samples = read_samples(rows)
    assert responses(samples) == [("h0", "h40")]
    assert "evaluation" in samples.caption


def test_read_samples_pairs_repeated_training_prompts_without_evaluations():
    rows = [
        sample(1, "a", "a1"),
        sample(1, "a", "second sample of a"),
        sample(1, "b", "b1"),
        sample(5, "b", "b5"),
        sample(5, "c", "in between"),
        sample(9, "a", "a9"),
        sample(9, "a", "second sample of a"),
        sample(9, "d", "d9"),
    ]
    samples = read_samples(rows)
    assert responses(samples) == [("b1", "b5"), ("a1", "a9")]
    assert "training" in samples.caption


def test_read_samples_pairs_first_and_newest_step_if_no_prompt_is_repeated():
    rows = [
        sample(step, f"p{step}{i}", f"r{step}{i}")
        for step in (1, 2, 3)
        for i in range(step)
        for _ in range(2)
    ]
    samples = read_samples(rows)
    assert responses(samples) == [("r10", "r30"), (None, "r31"), (None, "r32")]
    assert "first" in samples.caption and "newest" in samples.caption


def test_read_samples_with_single_step_has_no_later_samples():
    samples = read_samples([sample(3, "a", "a3"), sample(3, "b", "b3"), sample(3, "a", "again")])
    assert responses(samples) == [("a3", None), ("b3", None)]
    assert samples.caption


def test_page_for_a_single_step_has_no_placeholders_for_later_samples(tmp_path):
    folder = RunFolder(tmp_path / "short")
    folder.log_samples([SAMPLE | {"prompt": prompt} for prompt in ("a", "b")])
    page = report_run(folder.path).read_text()
    assert page.count('<div class="sample">') == 2
    assert "no sample" not in page


def test_read_samples_handles_many_rows():
    rows = (sample(step, f"prompt {step % 1000}", f"r{step}") for step in range(100_000))
    assert responses(read_samples(rows)) == [("r0", "r99000")]


def test_page_counts_failures_and_shows_newest_errors(run):
    run.log_metrics(41, {"train/failed_episodes": 2})
    run.log_metrics(42, {"train/failed_episodes": 3})
    run.log_samples(
        SAMPLE | dict(step=41, reward=None, error=f"TimeoutError {i}") for i in range(30)
    )
    view = read_stage(run.path)
    failed, errors = view.notices
    assert failed.endswith(": 5") and errors.endswith(": 30")
    page = page_of(report_run(run.path))
    assert "TimeoutError 29" in page.text
    assert "TimeoutError 3 " not in page.text


def test_page_shows_notices_above_charts(run):
    run.log_metrics(41, {"train/nonfinite_steps": 1})
    text = page_of(report_run(run.path)).text
    assert text.index("Step 41: train/nonfinite_steps is 1. ") < text.index("Reward")


def test_main_numbers_average_first_and_last_steps():
    series = {
        "train/reward": [(step, float(step > 50)) for step in range(1, 101)],
        "eval/eval_gsm8k_pass1": [(1, 0.25), (100, 0.5)],
    }
    assert main_numbers(series) == [
        ("eval/eval_gsm8k_pass1", 0.25, 0.5, 1),
        ("train/reward", 0.0, 1.0, 5),
    ]


@pytest.mark.parametrize(("steps", "averaged"), [(100, 5), (40, 2), (39, 1)])
def test_tile_shows_number_of_averaged_steps(tmp_path, steps: int, averaged: int) -> None:
    folder = RunFolder(tmp_path)
    for step in range(steps):
        folder.log_metrics(step, {"train/reward": 1.0})
    folder.log_metrics(steps, {"eval/eval_gsm8k_pass1": 0.5})
    evaluation, reward = read_stage(tmp_path).tiles
    assert (evaluation.steps, reward.steps) == (1, averaged)
    text = page_of(report_run(tmp_path)).text
    assert (f"first and last {averaged} steps" in text) == (averaged > 1)


def test_compare_has_one_line_per_run_that_logged_the_metric():
    points = [(1, 0.25), (2, 0.5)]
    runs = {
        "SFT": {"train/gpt_loss": points},
        "PPO": {"train/reward": points, "train/kl": points},
        "GRPO": {"train/reward": points, "train/entropy_loss": points},
    }
    (panel,) = compare(runs)
    assert panel.title == "reward"
    assert [line.label for line in panel.lines] == ["PPO", "GRPO"]
    assert compare({"PPO": runs["PPO"]}) == []


def test_short_label_returns_readable_names():
    assert short_label("train/response_length") == "response length"
    assert short_label("eval/eval_gsm8k_pass4") == "gsm8k pass@4"
    assert short_label("eval/eval_default_pass1") == "pass@1"  # for rows without a data source
    assert short_label("eval/eval gpt_loss") == "eval gpt loss"
    assert short_label("eval/acc_mean") == "eval acc mean"


def test_report_skips_unfinished_last_line(run):
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train/rew')
    assert "steps: 40" in page_of(report_run(run.path)).text


def test_vendored_library_version_is_stated_in_its_readme():
    vendor = Path(report.__file__).parent / "vendor"
    banner = (vendor / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    version = re.search(r"uPlot \(v([\d.]+)\)", banner)
    assert version
    for notice in (vendor / "README.md", Path(__file__).parents[2] / "NOTICE"):
        assert version[1] in notice.read_text(encoding="utf-8")
