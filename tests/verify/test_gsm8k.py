"""Tests one epoch of GRPO on GSM8K, with chat prompts and rewards from the math verifier."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrlhf.observability.run_folder import read_lines
from tests.ranks import ROOT
from tests.tiny import save_tiny_model, sayable
from tests.verify.results import write_result

pytestmark = pytest.mark.verify
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BATCH, SAMPLES = 512, 2


@pytest.mark.timeout(3000)
def test_every_gsm8k_prompt_is_sampled_rewarded_and_trained_on(
    data_dir: Path, tmp_path: Path
) -> None:
    problems = [json.loads(line) for line in (data_dir / "gsm8k" / "train.jsonl").open()]
    rows = [
        {
            "messages": [{"role": "user", "content": sayable(problem["question"])}],
            "answer": problem["answer"].split("####")[1].strip(),
        }
        for problem in problems
    ]
    dataset = tmp_path / "gsm8k.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny_model(
        tmp_path / "model",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        chat_template=TEMPLATE,
    )
    start = time.monotonic()
    flags = {
        "--actor.model_name_or_path": model,
        "--data.prompt_dataset": dataset,
        "--data.input_key": "messages",
        "--data.label_key": "answer",
        "--data.max_len": 1280,
        "--reward.verifier": "math",
        "--rollout.max_new_tokens": 16,
        "--rollout.batch_size": BATCH,
        "--rollout.n_samples_per_prompt": SAMPLES,
        "--rollout.micro_batch_size": 32,
        "--train.batch_size": BATCH * SAMPLES,
        "--train.micro_batch_size": 32,
        "--algo.advantage.estimator": "group_norm",
        "--algo.kl.init_coef": 0,
        "--ds.param_dtype": "fp32",
        "--run.dir": tmp_path / "run",
        "--ckpt.output_dir": tmp_path / "out",
        "--ckpt.path": tmp_path / "ckpt",
    }
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    command += [str(part) for pair in flags.items() for part in pair]
    command += ["--data.apply_chat_template", "--ds.packing_samples"]
    subprocess.run(command, cwd=ROOT, check=True)
    steps = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    samples = [row["rollout/num_samples"] for row in steps]
    assert sum(samples) == len(rows) * SAMPLES
    assert all(row["train/failed_episodes"] == 0 for row in steps)
    gap = max(row["train/logprob_gap_mean"] for row in steps)
    assert gap < 1e-5
    written = list(read_lines(tmp_path / "run" / "samples.jsonl"))
    assert {row["reward"] for row in written} <= {0.0, 1.0}
    table = [
        [
            len(rows),
            len(steps),
            int(sum(samples)),
            0,
            f"{gap:.1e}",
            f"{time.monotonic() - start:.0f}",
        ]
    ]
    columns = [
        "prompts",
        "steps",
        "samples",
        "failed",
        "mean log-prob gap, largest step",
        "seconds",
    ]
    write_result("gsm8k", "All of GSM8K through GRPO", "make verify", columns, table)
