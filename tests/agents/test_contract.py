"""Tests of the documented agent interface in real processes with a fake engine.

The engine's samples are a function of the prompt and the seed, so that tests can compute the
samples.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.agents.calculator_task import calculator_tokenizer
from openrlhf.agents import play
from openrlhf.agents.contract import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor
from openrlhf.agents.play import AgentEpisodes
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RemoteEnginesConfig, RolloutConfig, RuleConfig
from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory
from openrlhf.observability.metrics import Metric
from openrlhf.rewards import remote_engines
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine import EngineError, RequestRefused
from openrlhf.rollout.generator import Generate, RolloutGenerator, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from tests.openai_server import openai_server
from tests.streams import rollout
from tests.tiny import character_tokenizer

FILES = Path(__file__).parent / "agent_files"
BLOCKED_AT = (FILES / "trouble.py").read_text().split("time.sleep(1000)")[0].count("\n") + 1
TOKENIZER = character_tokenizer()
EOS = 1
MAX_LEN = 64
LATE = ("await for ever", "swallow", "block")  # labels of episodes that exceed a time limit
LATE_S = 2.0
GOOD = [{"role": "user", "content": "good"}]


class Engine:
    """An engine that samples one to seven digits and the end token, up to `max_tokens` tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        self.asked += [(tokens, each) for each in params]
        return [answer(tokens, each) for each in params]

    async def rest(self) -> None: ...

    def metrics(self) -> dict[str, Metric]:
        return {}


def answer(prompt: list[int], params: SamplingParams) -> Generation:
    generator = random.Random(f"{prompt} {params.seed}")
    count = generator.randrange(1, 8)
    sampled = [generator.randrange(4, 14) for _ in range(count)]
    sampled.append(EOS)
    tokens = sampled[: params.max_tokens]
    finish = "stop"
    if len(tokens) < len(sampled):
        finish = "length"
    logprobs = [-generator.random() for _ in tokens]
    return Generation(
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish,
        stop_reason=None,
        weight_versions=(3,),
    )


def spec(*, max_len: int = MAX_LEN, seed: int | None = 5, **flags: Any) -> SamplingSpec:
    rollout = RolloutConfig(**{"n_samples_per_prompt": 2, "max_new_tokens": 6} | flags)
    return SamplingSpec(purpose="train", rollout=rollout, max_len=max_len, seed=seed)


def prompt(text: str = "1+3=", label: Any = "4", index: int = 0) -> Prompt:
    return Prompt(index=index, text=text, tokens=TOKENIZER(text)["input_ids"], label=label)


class Stand:
    """A generator with agents, plus the engine that the agents sample from.

    The step timeout is `LATE_S` seconds for episodes with a label in `late`, and two minutes for
    all other episodes.
    """

    def __init__(
        self,
        file: str | Path,
        logs: Path,
        *,
        tokenizer: Any = TOKENIZER,
        late: Collection[str] = (),
        max_turns: int | None = None,
    ) -> None:
        limits = RolloutConfig(step_timeout=120.0, episode_timeout=240.0, max_turns=max_turns)
        processes = RuleConfig(workers=1, memory_gib=1.0)
        self.engine = Engine()
        self.logs = logs
        self.loop = BackgroundLoop()
        self.agents = AgentEpisodes(
            str(FILES / file), tokenizer, limits, processes, max_length=MAX_LEN, log_dir=logs
        )
        self._late = late
        self._late_agents = copy.copy(self.agents)  # shares the processes of `self.agents`
        self._late_agents.rollout = RolloutConfig(step_timeout=LATE_S, episode_timeout=240.0)
        self.generator = RolloutGenerator(self.engine, tokenizer, None, agents=self)

    async def play(
        self, prompt: Prompt, spec: SamplingSpec, generate: Generate
    ) -> list[Trajectory]:
        agents = self.agents
        if prompt.label in self._late:
            agents = self._late_agents
        return await agents.play(prompt, spec, generate)

    def rollout(self, *prompts: Prompt, **changes: Any) -> list[Trajectory]:
        return rollout(self.generator, prompts, spec(**changes), loop=self.loop)

    def check(self) -> None:
        self.loop.run(self.agents.check(), 120, doing="finish")

    def close(self) -> None:
        self.agents.close()
        self.loop.close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def turns(logs: Path) -> Iterator[Stand]:
    stand = Stand("turns.py", logs / "turns")
    yield stand
    stand.close()


@pytest.fixture(scope="module")
def trouble(logs: Path) -> Iterator[Stand]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "CANCELLATION_GRACE_S", 0.5)
        stand = Stand("trouble.py", logs / "trouble", late=LATE)
        yield stand
        stand.close()


def test_environment_with_the_documented_interface_runs(turns: Stand) -> None:
    first, second = turns.rollout(prompt())
    assert (first.sample_index, second.sample_index) == (0, 1)
    assert first.tokens != second.tokens
    assert first.stop_reason is StopReason.STOP or first.truncated
    assert first.extra_logs == {"steps": 3.0}
    assert first.weight_versions == (3,)
    texts = map(TOKENIZER.decode, sampled_pieces(first))
    assert first.reward == sum(text.count("4") for text in texts)


def sampled_pieces(trajectory: Trajectory) -> list[list[int]]:
    """Return the episode's runs of consecutive sampled tokens."""
    pieces: list[list[int]] = []
    was_sampled = False
    for token, sampled in zip(trajectory.tokens, trajectory.action_mask, strict=True):
        if sampled and not was_sampled:
            pieces.append([])
        if sampled:
            pieces[-1].append(token)
        was_sampled = sampled
    return pieces


def test_episodes_contain_exactly_the_sampled_tokens_and_logprobs(
    turns: Stand,
) -> None:
    turns.engine.asked.clear()
    for trajectory in turns.rollout(*(prompt(f"{i}+3=", index=i) for i in range(8))):
        position = len(trajectory.prompt.tokens)
        for turn in range(3):
            params = SamplingParams(
                seed=spec().seed_of(trajectory.prompt, trajectory.sample_index, turn), max_tokens=6
            )
            expected = answer(trajectory.tokens[:position], params)
            end = position + len(expected.tokens)
            assert trajectory.tokens[position:end] == expected.tokens
            assert trajectory.rollout_logprobs[position:end] == expected.logprobs
            assert all(trajectory.action_mask[position:end])
            feedback = TOKENIZER("=5" if turn == 2 else "+0=")["input_ids"]
            assert trajectory.tokens[end : end + len(feedback)] == feedback
            assert not any(trajectory.action_mask[end : end + len(feedback)])
            position = end + len(feedback)
        assert position == len(trajectory.tokens)


def test_episode_that_fills_the_context_is_truncated(turns: Stand) -> None:
    for trajectory in turns.rollout(prompt("1+" * 27 + "3="), n_samples_per_prompt=4):
        assert trajectory.truncated
        assert len(trajectory.tokens) <= MAX_LEN


def test_episode_that_reaches_max_turns_is_truncated(logs: Path) -> None:
    stand = Stand("turns.py", logs / "two", max_turns=2)
    for trajectory in stand.rollout(prompt()):
        assert trajectory.truncated and trajectory.extra_logs == {"steps": 2.0}
        assert len(sampled_pieces(trajectory)) == 2
    stand.close()


@pytest.fixture(scope="module")
def own_loop(logs: Path) -> Iterator[Stand]:
    stand = Stand("own_loop.py", logs / "own")
    yield stand
    stand.close()


def test_custom_executor_runs_an_episode(own_loop: Stand) -> None:
    own_loop.engine.asked.clear()
    [trajectory] = own_loop.rollout(prompt(label="own"), n_samples_per_prompt=1)
    [(tokens, params)] = own_loop.engine.asked
    assert (tokens, params.max_tokens, params.seed) == (trajectory.prompt.tokens, 1, 77)
    assert trajectory.truncated and trajectory.reward == 1.0
    assert trajectory.rollout_logprobs[len(tokens) :] == answer(tokens, params).logprobs


def test_environment_receives_env_kwargs_and_credits_each_turn_and_is_closed(
    own_loop: Stand,
) -> None:
    [trajectory] = own_loop.rollout(prompt(label="shop"), n_samples_per_prompt=1)
    first, second = (end - 1 for end in ends_of_actions(trajectory))
    assert trajectory.turn_rewards == ((first, 0.25), (second, 4.0))
    assert trajectory.reward == trajectory.score == 4.25
    [closed] = own_loop.rollout(prompt(label="closed?"), n_samples_per_prompt=1)
    assert closed.reward == 1.0  # the number of environments closed so far


def ends_of_actions(trajectory: Trajectory) -> list[int]:
    """Return the end position of each run of sampled tokens."""
    mask = [*trajectory.action_mask, False]
    return [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]


def test_step_function_from_older_releases_is_wrapped_with_a_notice(logs: Path) -> None:
    stand = Stand("old_step.py", logs / "old")
    for trajectory in stand.rollout(prompt("1=")):
        first, second = (
            TOKENIZER.decode(piece).removesuffix("<eos>") for piece in sampled_pieces(trajectory)
        )
        assert trajectory.reward == len(first) + len(second)
        assert (trajectory.score, trajectory.extra_logs) == (0.5, {"actions": 1.0})
    log = (logs / "old/agent-0.log").read_text()
    assert "[notice]" in log and "old_step.py" in log and "0.8.6" in log
    stand.close()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("missing.py", "No such file"),
        ("old_queue.py", r"0\.8\.7 to 0\.9\.0(.*\n)+ *async def execute\("),
        ("../../rewards/reward_files/trouble.py", "AgentExecutor"),
        ("misspelt.py", "Game.*step"),
        ("openai_client.py", "chat_template.jinja"),
        (
            "narrow_execute.py",
            r"AgentExecutor\.execute\(self, prompt, label\) cannot be called with \(prompt, label,",
        ),
        (
            "narrow_step.py",
            r"Game\.step\(self, observation, action\) cannot be called with \(states\): .*'action'",
        ),
        ("narrow_reset.py", r"Game\.reset\(self\) cannot be called with \(states\)"),
        (
            "narrow_client.py",
            r"run_agent\(self, prompt, label\) .* with \(prompt, label, session_id\)",
        ),
    ],
)
def test_file_without_an_agent_is_rejected_with_a_suggested_fix(
    logs: Path, file: str, words: str
) -> None:
    stand = Stand(file, logs / "refused")
    with pytest.raises(ConfigError, match=words) as refused:
        stand.check()
    assert "--train.agent_func_path" in str(refused.value)
    stand.close()


class NarrowGame(AgentInstanceBase):
    """An environment whose methods do not take `states`."""

    async def reset(self) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    async def step(self, action: str, turn: int) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class WideGame(NarrowGame):
    """An environment of which only `step` does not take `states`."""

    async def reset(self, states: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class OwnEpisode(MultiTurnAgentExecutor):
    """An executor that calls its environment only in its own `execute`."""

    async def execute(self, **_: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class OwnTurns(MultiTurnAgentExecutor):
    """An executor that takes the turns itself."""

    async def _take_turns(self, *_: Any) -> None: ...


class OwnClient(OpenAIAgentExecutor):
    """An executor that calls `run_agent` only in its own `execute`."""

    async def execute(self, **_: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    async def run_agent(self, prompt: str) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


def test_methods_that_only_the_users_executor_calls_may_have_any_signature() -> None:
    OwnEpisode(NarrowGame)
    OwnTurns(WideGame)
    OwnClient()
    with pytest.raises(TypeError, match=r"NarrowGame\.reset"):
        OwnTurns(NarrowGame)
    with pytest.raises(TypeError, match=r"WideGame\.step"):
        MultiTurnAgentExecutor(WideGame)


@pytest.mark.parametrize(
    ("label", "failure", "words"),
    [
        ("raise", Failure.EXCEPTION, "no such square"),
        ("raise before", Failure.EXCEPTION, "no such square"),
        ("await for ever", Failure.TIMEOUT, "more than 2 s (--rollout.step_timeout"),
        ("swallow", Failure.TIMEOUT, "more than 2 s (--rollout.step_timeout"),
        ("block", Failure.TIMEOUT, f'trouble.py", line {BLOCKED_AT} in execute'),
        ("leave", Failure.EXIT, "sys.exit(3)"),
        ("crash", Failure.EXIT, "it exited with status 7"),
        ("memory", Failure.MEMORY, "--reward.memory_gib is 1"),
        ("no dict", Failure.RESULT, "list"),
        ("nan", Failure.RESULT, "[nan]"),
        ("no reward", Failure.RESULT, "--reward.model_name_or_path"),
        ("invented", Failure.RESULT, "rollout_log_probs"),
        ("from the first token", Failure.RESULT, "token 0"),
        ("overlap", Failure.RESULT, "[[2, 5], [4, 6]]"),
        ("outside", Failure.RESULT, "[[2, 5000]]"),
        ("none sampled", Failure.RESULT, "[]"),
        ("too long a prompt", Failure.EXCEPTION, "500 tokens"),
        ("images", Failure.EXCEPTION, "multi_modal_data"),
    ],
)
def test_failing_agent_fails_only_its_own_episode(
    trouble: Stand, label: str, failure: Failure, words: str
) -> None:
    good, bad = trouble.rollout(
        prompt(index=1, label="fine"), prompt(index=2, label=label), n_samples_per_prompt=1
    )
    assert (good.reward, good.error) == (1.0, None)
    assert bad.failed and bad.reward is None
    assert bad.failure is failure, bad.error
    assert bad.error is not None and words in bad.error and "agent_files/trouble.py" in bad.error
    # An episode that times out may be cancelled before its first sample.
    if label not in (*LATE, "raise before", "memory", "crash"):
        assert bad.num_actions


def test_sample_with_agent_sampling_params_gets_a_separate_seed_per_turn(
    trouble: Stand,
) -> None:
    trouble.engine.asked.clear()
    asked = prompt(label="own parameters")
    trouble.rollout(asked, n_samples_per_prompt=1)
    assert [params.seed for _, params in trouble.engine.asked] == [
        spec().seed_of(asked, 0, turn) for turn in (0, 1)
    ]


def test_sample_aborted_by_the_engine_fails_its_episode(
    trouble: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_answer = answer

    def ended_answer(prompt: list[int], params: SamplingParams) -> Generation:
        return replace(whole_answer(prompt, params), finish_reason="engine 0 gave NaN")

    monkeypatch.setitem(globals(), "answer", ended_answer)
    [trajectory] = trouble.rollout(prompt(label="fine"), n_samples_per_prompt=1)
    assert trajectory.failure is Failure.ENGINE
    assert "engine 0 gave NaN" in str(trajectory.error)


def test_episodes_survive_a_neighbor_that_kills_their_process(trouble: Stand) -> None:
    labels = ["pause", "crash", "pause", "fine"]
    prompts = [prompt(index=i, label=label) for i, label in enumerate(labels)]
    finished = trouble.rollout(*prompts, n_samples_per_prompt=1, seed=9)
    others = [p for p in prompts if p.label != "crash"]
    again = trouble.rollout(*others, n_samples_per_prompt=1, seed=9)
    assert [t.failure for t in finished] == [None, Failure.EXIT, None, None]
    assert [t.tokens for t in finished if not t.failed] == [t.tokens for t in again]


@pytest.fixture(scope="module")
def clients(logs: Path) -> Iterator[Stand]:
    stand = Stand("openai_client.py", logs / "clients", tokenizer=calculator_tokenizer())
    yield stand
    stand.close()


def test_agent_with_a_stock_openai_client_is_recorded_token_by_token(
    clients: Stand,
) -> None:
    clients.engine.asked.clear()
    for trajectory in clients.rollout(*(prompt(f"{i}+3", "talk", index=i) for i in range(4))):
        assert trajectory.error is None
        assert (trajectory.reward, trajectory.score) == (1.0, 0.5)
        assert trajectory.extra_logs == {"turns": 3.0}
        text = calculator_tokenizer().decode(trajectory.tokens)
        assert text.startswith(f"<|user|>{trajectory.prompt.text}<|end|><|assistant|>")
        assert text.count("<|user|>+1<|end|><|assistant|>") == 2
        pieces = sampled_pieces(trajectory)
        for piece, request in zip(pieces, of_episode(clients.engine, trajectory), strict=True):
            tokens, params = request
            start, end = len(tokens), len(tokens) + len(piece)
            expected = answer(tokens, params)
            assert piece == expected.tokens
            assert trajectory.tokens[:end] == [*tokens, *piece]
            assert trajectory.rollout_logprobs[start:end] == expected.logprobs


def of_episode(engine: Engine, trajectory: Trajectory) -> list[tuple[list[int], SamplingParams]]:
    """Return an episode's requests to the engine, found by the seeds of the episode's turns."""
    seeds = [spec().seed_of(trajectory.prompt, trajectory.sample_index, turn) for turn in range(3)]
    return [next(asked for asked in engine.asked if asked[1].seed == seed) for seed in seeds]


def test_conversations_of_an_episode_are_recorded_token_by_token(clients: Stand) -> None:
    clients.engine.asked.clear()
    [trajectory] = clients.rollout(prompt("1+3", "summarise"), n_samples_per_prompt=1)
    assert (trajectory.error, trajectory.reward, trajectory.turns) == (None, 1.0, 3)
    samples = [answer(*request) for request in clients.engine.asked]
    first, second = trajectory.conversations
    assert second.tokens == clients.engine.asked[2][0] + samples[2].tokens
    assert sampled_logprobs(first) == samples[0].logprobs + samples[1].logprobs
    assert sampled_logprobs(second) == samples[2].logprobs


def sampled_logprobs(trajectory: Trajectory) -> list[float]:
    """Return the log-probabilities of an episode's sampled tokens."""
    positions = zip(trajectory.rollout_logprobs, trajectory.action_mask, strict=True)
    return [logprob for logprob, sampled in positions if sampled]


@pytest.mark.parametrize("label", ["stream", "look", "err"])
def test_endpoint_works_with_stock_clients(clients: Stand, label: str) -> None:
    for trajectory in clients.rollout(prompt("1+3=", label)):
        assert trajectory.reward is not None and trajectory.reward >= 1, trajectory.error


class StuckEngine(Engine):
    """An engine that responds only to an episode's first turn."""

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        if tokens.count(calculator_tokenizer().convert_tokens_to_ids("<|user|>")) > 1:
            await asyncio.sleep(1000)
        return await super().generate(key, tokens, params)


def test_abandoned_requests_are_cancelled_when_the_episode_ends(clients: Stand) -> None:
    engines = clients.generator.engines
    clients.generator.engines = StuckEngine()
    try:
        for index in range(2):
            abandoning = prompt("1+3", "give_up", index=index)
            [trajectory] = clients.rollout(abandoning, n_samples_per_prompt=1)
            # The reward counts the unfinished requests of earlier episodes.
            assert (trajectory.reward, trajectory.error) == (0, None)
    finally:
        clients.generator.engines = engines


def test_samples_requested_by_an_agent_server_thread_are_matched_by_tokens(
    logs: Path,
) -> None:
    """The server's requests do not identify the episode that they belong to.

    The server keeps using the first episode's engine, even in the second round, after that episode
    has ended.
    """
    stand = Stand("own_server.py", logs / "server")
    for round in range(2):
        stand.engine.asked.clear()
        episodes = stand.rollout(
            *(prompt(f"{i}+3=", index=4 * round + i) for i in range(4)), n_samples_per_prompt=2
        )
        asked = [(tokens, answer(tokens, params)) for tokens, params in stand.engine.asked]
        assert len(asked) == 16 and len({params.seed for _, params in stand.engine.asked}) == 16
        for episode in episodes:
            assert (episode.reward, episode.weight_versions) == (1.0, (3,)), episode.error
            for end in ends_of_actions(episode):
                start = end - episode.action_mask[:end][::-1].index(False)
                context = episode.tokens[:start]
                given = [sample.logprobs for tokens, sample in asked if tokens == context]
                assert episode.rollout_logprobs[start:end] in given
    stand.close()


def test_agent_that_sends_no_request_fails(clients: Stand) -> None:
    [trajectory] = clients.rollout(prompt("1+3=", "silent"), n_samples_per_prompt=1)
    assert trajectory.failed and "no request" in str(trajectory.error)


class FailingEngine(Engine):
    """An engine that raises a given error for every request."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        raise self.error


def test_rejected_request_fails_the_episode_and_a_dead_engine_ends_the_rollout(
    trouble: Stand,
) -> None:
    engines = trouble.generator.engines
    try:
        trouble.generator.engines = FailingEngine(RequestRefused("no such token"))
        [refused] = trouble.rollout(prompt(label="fine"), n_samples_per_prompt=1)
        assert refused.failure is Failure.EXCEPTION and "no such token" in str(refused.error)
        trouble.generator.engines = FailingEngine(EngineError("it is dead"))
        with pytest.raises(EngineError, match="it is dead"):
            trouble.rollout(prompt(label="fine"), n_samples_per_prompt=1)
    finally:
        trouble.generator.engines = engines
    [again] = trouble.rollout(prompt(label="fine"), n_samples_per_prompt=1)
    assert again.reward == 1.0


def test_agent_can_catch_rejections_and_use_numpy_numbers_as_parameters(own_loop: Stand) -> None:
    own_loop.engine.asked.clear()
    [trajectory] = own_loop.rollout(prompt(label="own"), n_samples_per_prompt=1)
    [(_, params)] = own_loop.engine.asked
    assert (type(params.temperature), params.temperature, trajectory.reward) == (float, 0.5, 1.0)


def test_remote_engine_failure_is_recorded_as_a_server_failure_of_the_episode(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote_engines.VARIABLE, "")
    with openai_server() as server:
        remote_engines.offer_engines(
            RemoteEnginesConfig(remote_engines=(f"helper={server.url}",)),
            RuleConfig(timeout=60, retries=1),
        )
        stand = Stand("asks.py", logs / "asks")
        models = ["loud", "broken", "slow", "wrong_json"]
        episodes = stand.rollout(
            *(prompt(label=model, index=i) for i, model in enumerate(models)),
            n_samples_per_prompt=1,
        )
        stand.close()
    assert [episode.reward for episode in episodes] == [1.0, None, None, None]
    assert [episode.failure for episode in episodes] == [None, *[Failure.SERVER] * 3]
    assert (
        "/v1/chat/completions",
        {"model": "loud", "messages": GOOD, "temperature": 0},
    ) in server.asked


@pytest.fixture(scope="module")
def mistakes(logs: Path) -> Iterator[Stand]:
    stand = Stand("mistakes.py", logs / "mistakes")
    yield stand
    stand.close()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("no observation", "Game.reset returned None"),
        ("none", "Game.step returned None"),
        ("no rewards", "Game.step returned no rewards (its keys are: done)"),
        ("no done", "Game.step returned no done"),
        ("done in words", "Game.step returned done 'no'"),
        ("done in a list", "Game.step returned done [False]"),
        ("two rewards", "Game.step returned rewards [1.0, 2.0]"),
        ("list", "Game.step returned environment_feedback ['no', 3]"),
        ("reward as text", "Game.step returned rewards '1.0'"),
        ("images", "Game.step returned environment_images"),
    ],
)
def test_invalid_environment_return_value_is_reported_without_a_traceback(
    mistakes: Stand, label: str, words: str
) -> None:
    [failed] = mistakes.rollout(prompt(label=label), n_samples_per_prompt=1)
    assert failed.failure is Failure.RESULT
    assert words in str(failed.error) and "agent_files/mistakes.py" in str(failed.error)
    assert "Traceback" not in str(failed.error)


def test_environment_methods_can_be_plain_functions(mistakes: Stand) -> None:
    [trajectory] = mistakes.rollout(prompt(label="well"), n_samples_per_prompt=1)
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("hot", "sampling_params.temperature is 'hot'"),
        ("huge numbers", f"sampling_params.seed is {2**70}"),
    ],
)
def test_error_names_a_sampling_parameter_of_the_wrong_type(
    mistakes: Stand, label: str, words: str
) -> None:
    [failed] = mistakes.rollout(prompt(label=label), n_samples_per_prompt=1)
    assert words in str(failed.error)
