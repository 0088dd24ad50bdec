"""Tests for the notice about RL runs with one sample per micro-batch, and for its advice."""

from __future__ import annotations

import re
import shlex

import pytest

from openrlhf.config.local_ppo import LocalPPOConfig
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.pass_sizes import CPU_TOKENS, GPU_TOKENS, check_pass_sizes
from tests.config.commands import parse, ppo, violations
from tests.sources import ROOT

PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/launching.md",
    "docs/agents.md",
    "examples/demo/run.py",
)
GRPO = (
    "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 "
    "--rollout.max_new_tokens 100"
)


def notice(config: PPOConfig, longest: int = 28, *, on_gpus: bool = False) -> str:
    """Return the notice about the pass sizes, or ""."""
    findings = check_pass_sizes(config, longest, on_gpus=on_gpus)
    assert not any(found.fails for found in findings)
    return " ".join(map(str, findings))


@pytest.mark.parametrize(("on_gpus", "tokens"), [(False, CPU_TOKENS), (True, GPU_TOKENS)])
def test_notice_names_single_sample_flags_and_tokens_per_pass(on_gpus: bool, tokens: int) -> None:
    text = notice(ppo(GRPO), on_gpus=on_gpus)
    assert "--train.micro_batch_size 1 and --rollout.micro_batch_size 1" in text
    advice = f"--train.dynamic_batch_enable --train.max_tokens_per_gpu {tokens}"
    assert advice in text and "at most 128 tokens" in text
    assert violations("train_ppo_ray", f"{GRPO} {advice}") == []
    assert notice(ppo(f"{GRPO} {advice}"), on_gpus=on_gpus) == ""


def test_notice_omits_default_sizes_above_one() -> None:
    words = f"--pretrain m --data.prompt_dataset d --reward.verifier math {GRPO}".split()
    config = parse_config(LocalPPOConfig, words, command="train_ppo")
    assert config.train.micro_batch_size > 1 and notice(config) == ""


def test_notice_omits_flags_set_by_the_user() -> None:
    text = notice(ppo(f"{GRPO} --rollout.micro_batch_size 1"))
    assert "--train.micro_batch_size 1" in text and "--rollout.micro_batch_size" not in text


@pytest.mark.parametrize(
    "line",
    [
        "--train.micro_batch_size 1 --rollout.micro_batch_size 1",
        "--train.dynamic_batch_enable",
        "--train.micro_batch_size 4 --rollout.micro_batch_size 4",
        "--rollout.max_new_tokens 1900",
    ],
    ids=["given", "by tokens", "larger", "long samples"],
)
def test_explicit_or_maximal_sizes_give_no_notice(line: str) -> None:
    assert notice(ppo(f"{GRPO} {line}")) == ""


def test_commands_in_readme_tutorial_and_demo_set_micro_batch_sizes() -> None:
    commands: list[str] = []
    for page in PAGES:
        text = (ROOT / page).read_text().replace("\\\n", " ")
        commands += re.findall(r"^(?:openrlhf ppo|.*train_ppo_ray) +(--.*)$", text, re.MULTILINE)
    assert len(commands) == 7
    for line in commands:
        given = " ".join(shlex.quote(word) for word in shlex.split(line, comments=True))
        sized = [path in given for path in ("train.micro_batch_size", "rollout.micro_batch_size")]
        assert all(sized) or "train.dynamic_batch_enable" in given, line
    demo = " ".join((ROOT / "examples/demo/run.py").read_text().split())
    assert (
        '"--rollout.micro_batch_size", "256"' in demo
        and '"--train.micro_batch_size", "256"' in demo
    )
    assert parse("train_ppo_ray").train.micro_batch_size == 1
