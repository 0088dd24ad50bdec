"""`openrlhf eval` without sampling: answers from a column, data loading, and dry runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.options import parse_config
from openrlhf.config.rollout import RolloutConfig
from openrlhf.data.errors import DataError
from openrlhf.data.first_look import TextFormat, record
from openrlhf.data.prompts import PromptDataset
from openrlhf.evaluation.comparing import given_text, readable, sampled
from openrlhf.evaluation.runs import Candidate, WrittenAnswers, read_answers, run_evaluation
from openrlhf.models.loading import ModelError
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.generator import RolloutGenerator, SamplingSpec
from openrlhf.trainers.sources import evaluate
from tests.agents.tokenizers import TOKENIZERS
from tests.tiny import character_tokenizer, save_reward_model, save_tiny_model

SPEC = SamplingSpec(
    purpose="eval",
    rollout=RolloutConfig(temperature=0.0, max_new_tokens=4, batch_size=3),
    max_len=8,
    seed=0,
)


class Length(Reward):
    """A reward that returns the response's length and fails if the response contains an x."""

    async def check(self) -> None: ...

    async def ask(self, requests: list[RewardRequest]) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        texts = [request.response for request in requests]
        return [
            RewardResult(error="an x") if "x" in text else RewardResult(reward=len(text))
            for text in texts
        ]


def test_answers_from_a_column_are_matched_to_prompts_and_scored_like_samples() -> None:
    """Two of the prompts are identical, one prompt is too long, and one answer cannot be scored."""
    tokenizer = character_tokenizer()
    texts = {"a=": "b", "12345678": "cc", "c=": "x"}
    asked = ["a=", "12345678", "a=", "c="]
    prompts = PromptDataset(Dataset.from_dict({"input": asked}), tokenizer, RLDataConfig())
    answers = [tokenizer(texts[text])["input_ids"] for text in asked]
    answers[2] = tokenizer("bbb")["input_ids"]
    engines = WrittenAnswers(answers)
    generator = RolloutGenerator(engines, tokenizer, Length())
    with closing(BackgroundLoop()) as loop:
        episodes = evaluate(prompts, generator, loop, SPEC, step=0, timeout_s=60)
    assert [episode.response_text for episode in episodes] == ["b", "cc", "bbb", "x"]
    assert [episode.reward for episode in episodes] == [1.0, 2.0, 3.0, None]
    assert [episode.failed for episode in episodes] == [False, False, False, True]


def test_judge_receives_text_without_special_tokens() -> None:
    tokenizer = character_tokenizer()
    text = given_text(tokenizer, 3, "x", tokenizer("2+2=4<eos>")["input_ids"])
    assert (text.prompt.index, text.prompt.datasource, text.response_text) == (3, "x", "2+2=4<eos>")
    assert sampled(text) == []
    assert readable(tokenizer, text.tokens) == "2+2=4"


# ---- checks before any process starts


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1+1=", "output": "2"}) + "\n")
    return save_tiny_model(tmp_path / "model", max_position_embeddings=4096)


def config_of(model: str, line: str) -> EvaluationConfig:
    rows = Path(model).parent / "rows.jsonl"
    return parse_config(
        EvaluationConfig,
        ["--eval.dataset", str(rows), *line.format(model=model).split()],
        command="eval",
    )


def candidate(tokenizer: Any, prompts: list[str]) -> Candidate:
    rows = PromptDataset(Dataset.from_dict({"input": prompts}), tokenizer, RLDataConfig())
    return Candidate(path="", tokenizer=tokenizer, prompts=rows)


def test_answers_read_from_a_column_end_with_the_eos_token(model: str) -> None:
    config = config_of(model, "--task rm_accuracy --reward.model_name_or_path {model}")
    tokenizer = character_tokenizer()
    asked = candidate(tokenizer, ["1+1="])
    assert read_answers(config, asked, "output") == [tokenizer("2<eos>")["input_ids"]]
    with pytest.raises(DataError, match=r"no column 'gone', which --against\.answer_key names"):
        read_answers(config, asked, "gone")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["How many?\n", "How many?"])
def test_answer_from_a_column_is_tokenized_as_the_continuation_of_its_prompt(
    model: str, kind: str, prompt: str
) -> None:
    config = config_of(model, "--task rm_accuracy --reward.model_name_or_path {model}")
    tokenizer = TOKENIZERS[kind]()
    asked = candidate(tokenizer, [prompt])
    [answer] = read_answers(config, asked, "output")
    joined = tokenizer(f"{prompt}2", add_special_tokens=False)["input_ids"]
    assert [*asked.prompts[0].tokens, *answer] == [*joined, tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (
            "--task rm_accuracy --reward.model_name_or_path {model}",
            ModelError,
            "is a language model",
        ),
        (
            "--model.model_name_or_path {model} --reward.verifier length --data.label_key gone",
            DataError,
            "'gone'",
        ),
        (
            "--model.model_name_or_path {model} --reward.verifier format --data.input_key gone",
            DataError,
            "'gone'",
        ),
        (
            "--model.model_name_or_path {model} --reward.verifier math --data.input_key input",
            DataError,
            "'output'",
        ),
    ],
)
def test_unsuitable_models_and_missing_columns_are_rejected(
    model: str, line: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_evaluation(config_of(model, line))


def test_dry_run_prints_the_prompts_of_an_evaluation(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "--model.model_name_or_path {model} --reward.verifier length --data.label_key output "
        "--dry_run"
    )
    run_evaluation(config_of(model, line))
    assert "--- prompt of row 1, label '2': 4 tokens, ids" in capsys.readouterr().out


def test_pairs_default_to_the_format_of_reward_model_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "pairs.jsonl"
    path = save_reward_model(tmp_path / "rm", Path(save_tiny_model(tmp_path / "model")))
    rows.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    tokenizer = character_tokenizer()
    record(tokenizer, TextFormat(input_template="Q{}A"))
    tokenizer.save_pretrained(path)
    flags = [
        "--task=rm_accuracy",
        f"--reward.model_name_or_path={path}",
        "--dry_run",
        f"--eval.dataset={rows}",
    ]
    trained = f"--reward.model_name_or_path {path} was trained with --data.input_template $'Q{{}}A'"
    run_evaluation(parse_config(EvaluationConfig, flags, command="eval"))
    said = capsys.readouterr()
    assert "1+1=" in said.out and said.err.count(trained) == 1
    run_evaluation(
        parse_config(EvaluationConfig, [*flags, "--data.input_template={}"], command="eval")
    )
    assert f"{trained}, but this run uses no template" in capsys.readouterr().err
    run_evaluation(
        parse_config(EvaluationConfig, [*flags, "--data.input_template=Q{}A"], command="eval")
    )
    assert "was trained with" not in capsys.readouterr().err
