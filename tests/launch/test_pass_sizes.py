"""The notice about RL runs with one sample per micro-batch, and its advice."""

from __future__ import annotations

import re
import shlex

import pytest

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


def advised(config: PPOConfig, longest: int = 28, *, on_gpus: bool = False) -> dict[str, int]:
    """Return the sizes in the notice, by flag; an empty dict if there is no notice."""
    fix = ""
    for found in check_pass_sizes(config, longest, on_gpus=on_gpus):
        assert not found.fails
        fix += found.fix
    sizes = re.findall(r"--([\w.]+micro_batch_size) (\d+)", fix)
    return {path: int(size) for path, size in sizes}


def test_notice_suggests_sizes_that_fit_in_a_forward_pass() -> None:
    assert advised(ppo(GRPO)) == {
        "train.micro_batch_size": 8,
        "rollout.micro_batch_size": CPU_TOKENS // 128,
    }
    assert advised(ppo(GRPO), on_gpus=True) == {
        "train.micro_batch_size": 64,
        "rollout.micro_batch_size": GPU_TOKENS // 128,
    }


@pytest.mark.parametrize("batch", [96, 100, 128, 1])
@pytest.mark.parametrize("longest", [1, 28, 500, 5000])
@pytest.mark.parametrize("ranks", [1, 4])
def test_suggested_sizes_are_valid_and_silence_the_notice(
    batch: int, longest: int, ranks: int
) -> None:
    line = (
        f"{GRPO} --rollout.batch_size {batch} --train.batch_size {4 * batch} "
        f"--actor.num_gpus_per_node {ranks}"
    )
    sizes = advised(ppo(line), longest)
    line += "".join(f" --{path} {size}" for path, size in sizes.items())
    assert violations("train_ppo_ray", line) == []
    assert advised(ppo(line), longest) == {}


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
    assert advised(ppo(f"{GRPO} {line}")) == {}


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
