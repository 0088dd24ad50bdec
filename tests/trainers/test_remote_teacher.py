"""Tests for a teacher model on a server: log-probabilities, vocabulary check and failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from openrlhf.config.flags import amend
from openrlhf.config.options import ConfigError
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.core.batches import Experience
from openrlhf.core.trajectory import Failure, Trajectory
from openrlhf.data.errors import DataError
from openrlhf.rewards.remote_engines import VARIABLE, offer_engines
from openrlhf.rewards.servers import ServerError
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.remote_teacher import RemoteTeacher, RemoteTeacherStage
from openrlhf.trainers.stages import EarlyStages, EpisodeRows
from tests.openai_server import OpenAIServer, openai_server
from tests.tiny import character_tokenizer
from tests.trainers.episodes import episode, failed

TOKENIZER = character_tokenizer()
UNUSED: Any = None


def wise() -> RemoteTeacher:
    return RemoteTeacher.named("wise")


def taught(episodes: list[Trajectory]) -> list[Trajectory]:
    """Return the episodes with the teacher's column added."""
    return EarlyStages(stages=[RemoteTeacherStage(wise())], timeout_s=60).score(episodes)


def text_of(token: int) -> str:
    return str(TOKENIZER.decode([token]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    monkeypatch.setenv(VARIABLE, "")
    with openai_server() as server:
        server.texts = text_of
        offer_engines(
            RemoteEnginesConfig(remote_engines=(f"wise={server.url}",)),
            RuleConfig(timeout=60, retries=0),
        )
        yield server


def test_every_token_except_the_first_gets_the_teachers_logprob(server: OpenAIServer) -> None:
    annotated = taught([episode(actions=3, score=1.0), episode(1, actions=1, score=0.0)])
    first, second = (t.columns["teacher_logprobs"].tolist() for t in annotated)
    assert first == pytest.approx([0.0, -0.1, -0.2, -0.3])
    assert second == pytest.approx([0.0, -0.1])
    wanted = {"model": "loud", "prompt": [0, 1, 2, 3], "prompt_logprobs": 0, "max_tokens": 1}
    assert ("/v1/completions", wanted) in server.asked
    column = Experience.from_trajectories(annotated).teacher_logprobs
    assert column is not None
    assert column.tolist() == pytest.approx([0.0, -0.1, -0.2, -0.3, 0.0, -0.1])


def test_no_teacher_column_is_added_without_a_remote_teacher() -> None:
    assert Experience.from_trajectories([episode(score=1.0)]).teacher_logprobs is None


def test_failed_and_filtered_episodes_are_not_sent(server: OpenAIServer) -> None:
    maker = ExperienceMaker(PPOConfig(), [RemoteTeacherStage(wise())])
    episodes = [failed(), episode(score=1.0, filtered=True)]
    assert maker.annotate(episodes).trajectories == episodes
    assert server.asked == []


@pytest.mark.parametrize("model", ["broken", "no_json", "wrong_json", "silent"])
def test_episode_fails_with_a_server_error_if_the_teacher_does_not_answer(
    server: OpenAIServer, model: str
) -> None:
    server.models = [{"id": model}]
    (lost,) = taught([episode(score=1.0)])
    assert (lost.failed, lost.failure, lost.reward) == (True, Failure.SERVER, None)
    assert "--algo.distill.teacher wise: remote engine" in (lost.error or "")


def test_unanswered_episode_does_not_shift_the_columns_of_other_episodes() -> None:
    class Forgetful(RemoteTeacher):
        async def scores(self, episode: Trajectory) -> list[float]:
            if episode.sample_index == 0:
                raise ServerError("gone")
            return [0.0, *(-float(token) for token in episode.tokens[1:])]

    group = [episode(0, 0, score=1.0), episode(0, 1, score=0.0, actions=2)]
    stage = RemoteTeacherStage(Forgetful("--algo.distill.teacher wise", UNUSED))
    config = amend(PPOConfig(), {"algo.advantage.estimator": "reinforce"})
    batch = ExperienceMaker(config, [stage]).annotate(group)
    assert [trajectory.failed for trajectory in batch.trajectories] == [True, False]
    assert batch.experience.tokens.tolist() == [0, 1, 2]
    assert batch.experience.teacher_logprobs is not None
    assert batch.experience.teacher_logprobs.tolist() == [0.0, -1.0, -2.0]


def test_episode_fails_and_its_request_is_cancelled_at_the_deadline() -> None:
    answered = threading.Event()
    cancelled = threading.Event()

    class Slow(RemoteTeacher):
        async def scores(self, episode: Trajectory) -> list[float]:
            if episode.sample_index == 0:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
            answered.set()
            return [0.0, -1.0]

    batch = EpisodeRows([episode(0, 0, score=1.0), episode(0, 1, score=0.0)])
    add = RemoteTeacherStage(Slow("--algo.distill.teacher wise", UNUSED)).launch(batch)
    assert answered.wait(30)
    batch = add(batch, 1.0)
    late, in_time = batch.episodes
    assert late.failure == Failure.SERVER
    assert "--algo.distill.teacher wise" in str(late.error)
    assert "--train.step_timeout" in str(late.error)
    assert not in_time.failed
    assert batch.rows.teacher_logprobs is not None
    assert batch.rows.teacher_logprobs.tolist()[2:] == [0.0, -1.0]
    assert cancelled.wait(30)


def test_conversations_of_an_episode_are_requested_concurrently(server: OpenAIServer) -> None:
    together = threading.Barrier(2)

    def table(tokens: list[int]) -> list[list[float]]:
        together.wait(30)  # times out if the requests arrive one after another
        return [[-float(len(tokens))] * 10] * (len(tokens) - 1)

    server.table = table
    last = replace(episode(actions=2, score=1.0), earlier=(episode(actions=1),))
    (annotated,) = taught([last])
    columns = [each.columns["teacher_logprobs"].tolist() for each in annotated.conversations]
    assert columns == [[0.0, -2.0], [0.0, -3.0, -3.0]]


def test_server_with_the_policys_vocabulary_and_enough_context_is_accepted(
    server: OpenAIServer,
) -> None:
    server.models = [{"id": "loud", "max_model_len": 65}]
    wise().check(TOKENIZER, max_len=64)
    sent = [body["prompt"] for _, body in server.asked if body]
    assert (sent[0][0], len(sent), len(sent[0])) == (0, 1, min(64, len(TOKENIZER)))


def test_probe_is_shortened_to_max_len(server: OpenAIServer) -> None:
    wise().check(TOKENIZER, max_len=10)
    assert all(len(body["prompt"]) <= 10 for _, body in server.asked if body)


def test_error_for_a_different_vocabulary_quotes_an_example_token(server: OpenAIServer) -> None:
    server.texts = lambda token: text_of(token) if token < 20 else "?"
    with pytest.raises(
        DataError,
        match=r"--algo\.distill\.teacher wise .*vocabulary.*token 20 is '\?' on the server",
    ):
        wise().check(TOKENIZER, max_len=64)


def test_server_that_returns_no_token_texts_causes_a_warning(
    server: OpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.texts = lambda _: None
    wise().check(TOKENIZER, max_len=64)
    assert "--algo.distill.teacher wise does not return token texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"id": "loud", "max_model_len": 64},
            "accepts 64 tokens including one generated token, too few for --data.max_len 64",
        ),
        (
            {"id": "unknown"},
            "must be a vLLM server with the policy's vocabulary. .*no such model",
        ),
        ({"id": "wrong_json"}, r"returned no list at choices\.0\.prompt_logprobs"),
    ],
)
def test_server_that_cannot_be_a_teacher_is_rejected_at_startup(
    server: OpenAIServer, model: dict[str, object], said: str
) -> None:
    server.models = [model]
    with pytest.raises(ConfigError, match=said):
        wise().check(TOKENIZER, max_len=64)
