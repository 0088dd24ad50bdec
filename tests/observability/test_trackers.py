"""Trackers receive the same metrics as the run folder and never stop a run."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf.config.options import ConfigError
from openrlhf.config.shared import LoggerConfig, WandbConfig
from openrlhf.observability.trackers import Trackers, make_trackers

# A fake wandb package that records calls in a file in its own folder.
FAKE_WANDB = """
import json, pathlib
calls = pathlib.Path(__file__).with_name("calls.jsonl")

def record(what, **fields):
    with calls.open("a") as file:
        file.write(json.dumps({"what": what, **fields}) + "\\n")

class Run:
    id = "run-1"
    def define_metric(self, name, step_metric):
        record("define_metric", name=name, step_metric=step_metric)
    def log(self, row):
        if "train/kl" in row and row["train/kl"] < 0:
            raise ConnectionError("network is down")
        record("log", row={k: getattr(v, "rows", v) for k, v in row.items()})
    def finish(self):
        record("finish")

class Table:
    def __init__(self, columns, data):
        self.rows = [columns, *data]

def login(key):
    record("login", key=key)

def init(**kwargs):
    if kwargs["project"] == "unreachable":
        raise TimeoutError("no answer in 90 s")
    record("init", **kwargs)
    return Run()
"""


class Recording:
    """A tracker that records its calls.

    If `fails` is set, `log` raises an error from the second call on.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[tuple] = []
        self.closed = False

    def log(self, step, values):
        if self.fails and self.seen:
            raise OSError("disk full")
        self.seen.append((step, dict(values)))

    def log_samples(self, step, text, reward):
        self.seen.append((step, text, reward))

    def close(self):
        self.closed = True


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    """Install the fake package, and return a function that reads the recorded calls."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    yield lambda: [json.loads(line) for line in (place / "calls.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def wandb_flags(**changes) -> LoggerConfig:
    fields = {"key": "k" * 40, "org": "team", "group": None, "project": "p", "run_name": "r"}
    return LoggerConfig(wandb=WandbConfig(**(fields | changes)))


def start(config: LoggerConfig, run_dir: Path, **kwargs) -> Trackers:
    return make_trackers(config, settings={"train": {"seed": 1}}, run_dir=run_dir, **kwargs)


def read_events(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def test_every_tracker_receives_the_same_calls():
    recordings = [Recording(), Recording()]
    trackers = Trackers(recordings)
    trackers.log(3, {"train/kl": 0.5})
    trackers.log_samples(3, "2+2=4", 1.0)
    trackers.close()
    for recording in recordings:
        assert recording.seen == [(3, {"train/kl": 0.5}), (3, "2+2=4", 1.0)]
        assert recording.closed


def test_failing_tracker_is_reported_once_and_others_continue(capsys):
    good, bad = Recording(), Recording(fails=True)
    trackers = Trackers([bad, good])
    for step in (1, 2, 3):
        trackers.log(step, {})
    assert [step for step, _ in good.seen] == [1, 2, 3]
    assert [step for step, _ in bad.seen] == [1]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("[warning] ") and "Recording" in warning and "disk full" in warning


def test_no_tracker_starts_without_flags(tmp_path):
    start(LoggerConfig(), tmp_path).log(1, {"train/kl": 0.5})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_has_metrics_and_samples_under_run_name(tmp_path):
    config = LoggerConfig(tensorboard_dir=str(tmp_path), wandb=WandbConfig(run_name="my_run"))
    trackers = start(config, tmp_path / "run")
    trackers.log(1, {"train/kl": 0.5, "eval/eval gpt_loss": 2.0})
    trackers.log(2, {"train/kl": 0.25})
    trackers.log_samples(2, "line one\n# not a heading", 1.0)
    events = read_events(tmp_path / "my_run")  # readable while the run is active
    assert [(e.step, e.value) for e in events.Scalars("train/kl")] == [(1, 0.5), (2, 0.25)]
    assert [e.value for e in events.Scalars("eval/eval gpt_loss")] == [2.0]
    (sample,) = events.Tensors("train/generated_samples/text_summary")
    text = sample.tensor_proto.string_val[0].decode()
    assert text == "reward 1.0\n\n    line one\n    # not a heading"
    trackers.close()


def test_tensorboard_defaults_to_name_of_run_folder(tmp_path):
    trackers = start(LoggerConfig(tensorboard_dir=str(tmp_path / "board")), tmp_path / "runs/sft-1")
    trackers.log(1, {"train/kl": 0.5})
    trackers.close()
    assert [e.value for e in read_events(tmp_path / "board/sft-1").Scalars("train/kl")] == [0.5]


def test_resumed_run_hides_tensorboard_events_after_resume_step(tmp_path):
    config = LoggerConfig(tensorboard_dir=str(tmp_path), wandb=WandbConfig(run_name="r"))
    first = start(config, tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"train/kl": 1.0})
    first.close()
    second = start(config, tmp_path, resume_step=2)
    second.log(3, {"train/kl": 7.0})
    second.close()
    shown = [(e.step, e.value) for e in read_events(tmp_path / "r").Scalars("train/kl")]
    assert shown == [(1, 1.0), (2, 1.0), (3, 7.0)]


def test_unwritable_tensorboard_folder_prints_a_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    trackers = start(LoggerConfig(tensorboard_dir=str(tmp_path / "file")), tmp_path)
    trackers.log(1, {"train/kl": 0.5})
    assert "TensorBoard" in capsys.readouterr().err


def test_wandb_key_without_package_raises_config_error_naming_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # wandb leaves a folder with the package's name
    with pytest.raises(ConfigError, match=r"--logger.wandb.key.*pip install wandb"):
        start(wandb_flags(), tmp_path)


def test_wandb_uses_separate_axes_for_training_and_evaluation(tmp_path, fake_wandb):
    trackers = start(wandb_flags(), tmp_path)
    trackers.log(4, {"train/kl": 0.5, "timing/broadcast": 1.0})
    trackers.log(4, {"eval/eval_loss": 2.0})
    trackers.log_samples(4, "text", 1.0)
    trackers.log_samples(5, "more", None)
    trackers.close()
    calls = fake_wandb()
    assert calls[0] == {"what": "login", "key": "k" * 40}
    assert calls[1]["entity"] == "team"
    assert calls[1]["config"] == {"train": {"seed": 1}}
    axes = {c["name"]: c["step_metric"] for c in calls if c["what"] == "define_metric"}
    assert axes["train/*"] == axes["timing/*"] == "train/global_step"
    assert axes["eval/*"] == "eval/global_step"
    logged = [call["row"] for call in calls if call["what"] == "log"]
    assert logged == [
        {"train/kl": 0.5, "timing/broadcast": 1.0, "train/global_step": 4},
        {"eval/eval_loss": 2.0, "eval/global_step": 4},
        {
            "train/generated_samples": [["global_step", "text", "reward"], [4, "text", 1.0]],
            "train/global_step": 4,
        },
        {
            "train/generated_samples": [
                ["global_step", "text", "reward"],
                [4, "text", 1.0],
                [5, "more", None],
            ],
            "train/global_step": 5,
        },
    ]
    assert calls[-1] == {"what": "finish"}


def test_wandb_table_is_uploaded_when_a_tenth_of_its_rows_are_new(tmp_path, fake_wandb):
    trackers = start(wandb_flags(), tmp_path)
    for step in range(1, 410):
        trackers.log_samples(step, "text", 1.0)
    trackers.close()
    tables = [call["row"] for call in fake_wandb() if call["what"] == "log"]
    steps = [row["train/global_step"] for row in tables]
    assert steps[:10] == list(range(1, 11))
    assert len([step for step in steps if step > 200]) == 11
    assert steps[-1] == 409
    assert len(tables[-1]["train/generated_samples"]) == 201  # the header and the latest samples


def test_short_wandb_key_uses_existing_login(tmp_path, fake_wandb):
    start(wandb_flags(key="True"), tmp_path)
    assert fake_wandb()[0]["what"] == "init"


def test_resumed_run_continues_its_wandb_run(tmp_path, fake_wandb):
    start(wandb_flags(), tmp_path)
    start(wandb_flags(), tmp_path, resume_step=3)
    ids = [call["id"] for call in fake_wandb() if call["what"] == "init"]
    assert ids == [None, "run-1"]


def test_unreachable_wandb_prints_a_warning_and_logging_continues(tmp_path, fake_wandb, capsys):
    trackers = start(wandb_flags(project="unreachable"), tmp_path)
    trackers.log(1, {"train/kl": 0.5})
    assert "W&B" in capsys.readouterr().err
    assert [call["what"] for call in fake_wandb()] == ["login"]


def test_later_network_failure_is_reported_once(tmp_path, fake_wandb, capsys):
    trackers = start(wandb_flags(), tmp_path)
    for kl in (0.5, -1.0, 0.25):
        trackers.log(1, {"train/kl": kl})
    assert capsys.readouterr().err.count("network is down") == 1
    logged = [call["row"]["train/kl"] for call in fake_wandb() if call["what"] == "log"]
    assert logged == [0.5]
