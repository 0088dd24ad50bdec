"""Measures tokens per second in generation and training; the speeds are not asserted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.observability.run_folder import read_lines
from openrlhf.rollout.sampling import SamplingParams
from tests.e2e.commands import column, run, write_rows
from tests.gpu.place import save_model, started_engine
from tests.gpu.rehearsal import REHEARSAL

pytestmark = pytest.mark.gpu
SAMPLES, NEW_TOKENS = (8, 16) if REHEARSAL else (256, 256)
ROWS, LENGTH, STEPS = (4, 64, 4) if REHEARSAL else (16, 1024, 8)


def test_generation_speed_is_recorded(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    import ray

    save_model(tmp_path)
    with started_engine(tmp_path, enforce_eager=False) as engine:
        params = [SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)] * SAMPLES
        ray.get(
            engine.generate.remote([5, 6, 7], params), timeout=240
        )  # warm up: fill caches and capture CUDA graphs
        began = time.perf_counter()
        samples = ray.get(engine.generate.remote([5, 6, 7], params), timeout=240)
        seconds = time.perf_counter() - began
    assert [len(sample.tokens) for sample in samples] == [NEW_TOKENS] * SAMPLES
    record_property("tokens_per_second", round(SAMPLES * NEW_TOKENS / seconds))


def test_training_speed_is_recorded(tmp_path: Path, record_property: Callable[[str, object], None]):
    save_model(tmp_path / "model")
    rows = [{"input": "say a", "output": "ab" * (LENGTH // 2 - 4)}] * ROWS * STEPS
    flags = {
        "model.model_name_or_path": tmp_path / "model",
        "data.dataset": write_rows(tmp_path / "rows.jsonl", rows),
        "data.input_key": "input",
        "data.output_key": "output",
        "data.max_len": LENGTH,
        "train.batch_size": ROWS,
        "train.micro_batch_size": 4,
        "train.max_epochs": 1,
        "ds.packing_samples": True,
        "run.dir": tmp_path / "run",
        "ckpt.output_dir": tmp_path / "out",
        "ckpt.path": tmp_path / "checkpoints",
    }
    run("train_sft", flags, timeout=115)
    losses = column(tmp_path / "run", "train/gpt_loss")
    assert len(losses) == STEPS and losses[-1] < losses[0]
    times = [
        row["time"] for row in read_lines(tmp_path / "run/metrics.jsonl") if "train/gpt_loss" in row
    ]
    measured = STEPS // 2  # the first steps compile kernels and fill caches
    record_property(
        "tokens_per_second", round(ROWS * LENGTH * measured / (times[-1] - times[-1 - measured]))
    )
