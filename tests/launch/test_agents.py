"""Tests for the trial episode that an agent runs before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.checks import Finding
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.launch import agents
from openrlhf.launch.settings import train_sampling
from openrlhf.rollout.sampling import Generation, SamplingParams
from tests.e2e.commands import as_arguments
from tests.tiny import character_tokenizer

FILES = Path(agents.__file__).parents[2] / "tests/agents/agent_files"
TOKENIZER = character_tokenizer()


def config_with(file: str) -> PPOConfig:
    flags = {
        "actor.model_name_or_path": "m",
        "data.prompt_dataset": "d",
        "data.label_key": "l",
        "algo.advantage.estimator": "reinforce",
        "train.agent_func_path": FILES / file,
        "reward.workers": 1,
    }
    return parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray")


def tried(file: str, label: str) -> list[Finding]:
    prompt = Prompt(index=0, text="1+2", tokens=TOKENIZER("1+2")["input_ids"], label=label)
    config = config_with(file)
    return agents.check_agents(config, TOKENIZER, prompt, train_sampling(config))


@pytest.mark.parametrize(
    ("file", "label", "words"),
    [
        ("mistakes.py", "none", "step"),
        ("trouble.py", "raise", "no such square"),
        ("trouble.py", "no reward", "execute returned no reward"),
    ],
)
def test_agent_that_fails_in_the_trial_gets_a_notice(file: str, label: str, words: str) -> None:
    [finding] = tried(file, label)
    assert not finding.fails
    assert words in finding.seen and repr(label) in finding.seen


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """The answers that agents get in their trials."""
    answers: list[Generation] = []
    give = agents.given_answer

    def recorded(*arguments: Any) -> Generation:
        answers.append(give(*arguments))
        return answers[-1]

    monkeypatch.setattr(agents, "given_answer", recorded)
    return answers


@pytest.mark.parametrize(
    ("file", "label", "turns"), [("mistakes.py", "well", 1), ("turns.py", "3", 3)]
)
def test_agent_that_succeeds_in_the_trial_gets_no_notice(
    file: str,
    label: str,
    turns: int,
    given: list[Generation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "TRIAL_SECONDS", None)
    assert tried(file, label) == []
    assert len(given) == turns


def test_trial_that_takes_too_long_ends_without_a_notice(
    given: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "TRIAL_SECONDS", 5.0)
    assert tried("trouble.py", "await for ever") == []
    assert len(given) == 1


@pytest.mark.parametrize(
    ("label", "limit", "text", "finish_reason"),
    [
        ("12", None, "12<eos>", "stop"),
        ("12", 3, "12<eos>", "stop"),
        ("12", 2, "12", "length"),
        ("12<eos>", 8, "12<eos>", "stop"),
        (["12"], 8, "<eos>", "stop"),
    ],
)
def test_label_is_given_as_a_sample_within_the_limit(
    label: object, limit: int | None, text: str, finish_reason: str
) -> None:
    tokens = TOKENIZER("1+2")["input_ids"]
    params = SamplingParams(max_tokens=limit)
    generation = agents.given_answer(TOKENIZER, tokens, label, params)
    assert TOKENIZER.decode(generation.tokens) == text
    assert len(generation.logprobs) == len(generation.tokens)
    assert generation.finish_reason == finish_reason
