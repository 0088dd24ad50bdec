"""Tokens per second of generation and of training. The figures are recorded, and not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.rollout.sampling import SamplingParams
from tests.gpu.place import save_model, started_engine
from tests.gpu.rehearsal import REHEARSAL

pytestmark = pytest.mark.gpu
SAMPLES, NEW_TOKENS = (8, 16) if REHEARSAL else (256, 256)
ROWS, LENGTH, STEPS = (4, 64, 4) if REHEARSAL else (16, 1024, 8)


def test_generation(tmp_path: Path, record_property: Callable[[str, object], None]):
    import ray

    save_model(tmp_path)
    with started_engine(tmp_path, enforce_eager=False) as engine:
        params = [SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)] * SAMPLES
        ray.get(engine.generate.remote([5, 6, 7], params), timeout=240)  # a first time, for caches and graphs
        began = time.perf_counter()
        samples = ray.get(engine.generate.remote([5, 6, 7], params), timeout=240)
        seconds = time.perf_counter() - began
    assert [len(sample.tokens) for sample in samples] == [NEW_TOKENS] * SAMPLES
    record_property("tokens_per_second", round(SAMPLES * NEW_TOKENS / seconds))


def test_training(tmp_path: Path, record_property: Callable[[str, object], None]):
    save_model(tmp_path / "model")
    rows = [{"input": "say a", "output": "ab" * (LENGTH // 2 - 4)}] * ROWS * STEPS
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "model.model_name_or_path": tmp_path / "model",
        "data.dataset": tmp_path / "rows.jsonl",
        "data.input_key": "input",
        "data.output_key": "output",
        "data.max_len": LENGTH,
        "train.batch_size": ROWS,
        "train.micro_batch_size": 4,
        "train.max_epochs": 1,
        "run.dir": tmp_path / "run",
        "ckpt.output_dir": tmp_path / "out",
        "ckpt.path": tmp_path / "checkpoints",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "openrlhf.cli.train_sft", "--ds.packing_samples", *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"}, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "train/gpt_loss" in step]
    assert len(steps) == STEPS and steps[-1]["train/gpt_loss"] < steps[0]["train/gpt_loss"]
    measured = STEPS // 2  # the first steps compile kernels and fill caches
    seconds = steps[-1]["time"] - steps[-1 - measured]["time"]
    record_property("tokens_per_second", round(ROWS * LENGTH * measured / seconds))
