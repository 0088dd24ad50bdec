"""Agents: the documented contract, run in real processes, against an engine that is written down
here.

The engine's answers are a function of the prompt and the seed, so what a sample should be can be
said in advance.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.agents.calculator_task import calculator_tokenizer
from openrlhf.agents import play
from openrlhf.agents.play import AgentEpisodes
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RemoteEnginesConfig, RolloutConfig, RuleConfig
from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory
from openrlhf.observability.metrics import Metric
from openrlhf.rewards import remote_engines
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine import EngineError, RequestRefused
from openrlhf.rollout.generator import RolloutGenerator, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from tests.openai_server import openai_server
from tests.streams import rollout
from tests.tiny import character_tokenizer

FILES = Path(__file__).parent / "agent_files"
BLOCKED_AT = (FILES / "trouble.py").read_text().split("time.sleep(1000)")[0].count("\n") + 1
TOKENIZER = character_tokenizer()
EOS = 1
MAX_LEN = 64
GOOD = [{"role": "user", "content": "good"}]


class Engine:
    """Digits, as many as it likes, then the end token, unless `max_tokens` come first."""

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
    sampled = [*(generator.randrange(4, 14) for _ in range(generator.randrange(1, 8))), EOS]
    tokens = sampled[: params.max_tokens]
    finish = "stop" if tokens == sampled else "length"
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
    """A generator with agents, and the engine they sample from."""

    def __init__(
        self, file: str | Path, logs: Path, *, tokenizer: Any = TOKENIZER, **changes: Any
    ) -> None:
        limits = RolloutConfig(**{"step_timeout": 120.0, "episode_timeout": 240.0, **changes})
        processes = RuleConfig(workers=1, memory_gib=1.0)
        self.engine = Engine()
        self.logs = logs
        self.loop = BackgroundLoop()
        self.agents = AgentEpisodes(
            str(FILES / file), tokenizer, limits, processes, max_length=MAX_LEN, log_dir=logs
        )
        self.generator = RolloutGenerator(self.engine, tokenizer, None, agents=self.agents)

    def rollout(self, *prompts: Prompt, **changes: Any) -> list[Trajectory]:
        return rollout(self.generator, prompts, spec(**changes), loop=self.loop)

    def check(self) -> None:
        self.loop.run(self.agents.check(), 120)

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
        patch.setattr(play, "GRACE_S", 0.5)
        stand = Stand("trouble.py", logs / "trouble", step_timeout=3.0)
        yield stand
        stand.close()


def test_an_environment_of_the_documented_contract_runs_as_it_is(turns: Stand) -> None:
    first, second = turns.rollout(prompt())
    assert (first.sample_index, second.sample_index) == (0, 1)
    assert first.tokens != second.tokens
    assert first.stop_reason is StopReason.STOP or first.truncated
    assert first.extra_logs == {"steps": 3.0}
    assert first.weight_versions == (3,)
    assert first.reward == sum(
        TOKENIZER.decode(piece).count("4") for piece in sampled_pieces(first)
    )


def sampled_pieces(trajectory: Trajectory) -> list[list[int]]:
    """The runs of sampled tokens."""
    pieces: list[list[int]] = []
    for before, token, sampled in zip(
        [False, *trajectory.action_mask], trajectory.tokens, trajectory.action_mask, strict=False
    ):
        if sampled and not before:
            pieces.append([])
        if sampled:
            pieces[-1].append(token)
    return pieces


def test_masks_and_logprobs_are_exactly_what_the_engine_sampled(turns: Stand) -> None:
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


def test_turns_that_fill_the_context_end_the_episode_as_truncated(turns: Stand) -> None:
    for trajectory in turns.rollout(prompt("1+" * 27 + "3="), n_samples_per_prompt=4):
        assert trajectory.truncated
        assert len(trajectory.tokens) <= MAX_LEN


def test_a_limit_of_turns_ends_the_episode_as_truncated(logs: Path) -> None:
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


def test_an_executor_may_have_a_loop_of_its_own(own_loop: Stand) -> None:
    own_loop.engine.asked.clear()
    [trajectory] = own_loop.rollout(prompt(label="own"), n_samples_per_prompt=1)
    [(tokens, params)] = own_loop.engine.asked
    assert (tokens, params.max_tokens, params.seed) == (trajectory.prompt.tokens, 1, 77)
    assert trajectory.truncated and trajectory.reward == 1.0
    assert trajectory.rollout_logprobs[len(tokens) :] == answer(tokens, params).logprobs


def test_an_environment_gets_its_arguments_and_is_closed_and_turns_have_rewards_of_their_own(
    own_loop: Stand,
) -> None:
    [trajectory] = own_loop.rollout(prompt(label="shop"), n_samples_per_prompt=1)
    first, second = (end - 1 for end in ends_of_actions(trajectory))
    assert trajectory.turn_rewards == ((first, 0.25), (second, 4.0))
    assert trajectory.reward == trajectory.score == 4.25
    [told] = own_loop.rollout(prompt(label="closed?"), n_samples_per_prompt=1)
    assert told.reward == 1.0


def ends_of_actions(trajectory: Trajectory) -> list[int]:
    """Where each run of sampled tokens ends."""
    mask = [*trajectory.action_mask, False]
    return [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]


def test_a_function_step_of_older_releases_is_wrapped(logs: Path) -> None:
    stand = Stand("old_step.py", logs / "old")
    for trajectory in stand.rollout(prompt("1=")):
        first, second = (
            TOKENIZER.decode(piece).removesuffix("<eos>") for piece in sampled_pieces(trajectory)
        )
        assert trajectory.reward == len(first) + len(second)
        assert (trajectory.score, trajectory.extra_logs) == (0.5, {"actions": 1.0})
    assert "it is wrapped" in (logs / "old/agent-0.log").read_text()
    stand.close()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("missing.py", "No such file"),
        ("old_queue.py", "is written for releases 0.8.7 to 0.9.0"),
        (
            "../../rewards/reward_files/trouble.py",
            "has no class AgentExecutor; its classes are: none. Around an",
        ),
        ("misspelt.py", "Game has no method step"),
        ("openai_client.py", "put one, as chat_template.jinja, into the model's folder"),
    ],
)
def test_a_file_that_is_no_agent_is_refused_with_what_to_do(
    logs: Path, file: str, words: str
) -> None:
    stand = Stand(file, logs / "refused")
    with pytest.raises(ConfigError, match=words) as refused:
        stand.check()
    assert "--train.agent_func_path" in str(refused.value)
    stand.close()


@pytest.mark.parametrize(
    ("label", "failure", "words"),
    [
        ("raise", Failure.EXCEPTION, "no such square"),
        ("raise before", Failure.EXCEPTION, "no such square"),
        (
            "await for ever",
            Failure.TIMEOUT,
            "more than 3 s (--rollout.step_timeout, between two samples)",
        ),
        ("swallow", Failure.TIMEOUT, "more than 3 s (--rollout.step_timeout, between two samples)"),
        ("block", Failure.TIMEOUT, f'trouble.py", line {BLOCKED_AT} in execute'),
        ("leave", Failure.EXIT, "sys.exit(3)"),
        ("crash", Failure.EXIT, "it exited with status 7"),
        ("memory", Failure.MEMORY, "--reward.memory_gib is 1"),
        ("no dict", Failure.RESULT, "execute returned list, not a dict"),
        (
            "nan",
            Failure.RESULT,
            "trouble.py: execute or step returned rewards that are not finite: [nan]",
        ),
        ("no reward", Failure.RESULT, "there is no --reward.model_name_or_path"),
        ("invented", Failure.RESULT, "which the engine did not sample"),
        ("from the first token", Failure.RESULT, "action_ranges start at token 0"),
        ("overlap", Failure.RESULT, "action_ranges must go up"),
        ("outside", Failure.RESULT, "stay within"),
        ("none sampled", Failure.RESULT, "at least one"),
        ("too long a prompt", Failure.EXCEPTION, "a prompt of 500 tokens: 1 to 63 fit"),
        ("images", Failure.EXCEPTION, "reads text only"),
    ],
)
def test_an_agent_that_goes_wrong_fails_its_own_episode(
    trouble: Stand, label: str, failure: Failure, words: str
) -> None:
    good, bad = trouble.rollout(
        prompt(index=1, label="fine"), prompt(index=2, label=label), n_samples_per_prompt=1
    )
    assert (good.reward, good.error) == (1.0, None)
    assert bad.failed and bad.reward is None
    assert bad.failure is failure, bad.error
    assert bad.error is not None and words in bad.error and "agent_files/trouble.py" in bad.error
    if label not in (
        "raise before",
        "memory",
        "swallow",
        "block",
        "crash",
    ):  # where a sample was had before
        assert bad.num_actions


def test_a_sample_with_parameters_of_the_agents_own_has_a_seed_too(trouble: Stand) -> None:
    trouble.engine.asked.clear()
    asked = prompt(label="own parameters")
    trouble.rollout(asked, n_samples_per_prompt=1)
    assert [params.seed for _, params in trouble.engine.asked] == [
        spec().seed_of(asked, 0, turn) for turn in (0, 1)
    ]


def test_a_sample_that_the_engine_ended_fails_its_episode(
    trouble: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        globals(), "answer", lambda *asked: replace(answer_well(*asked), finish_reason="error")
    )
    [trajectory] = trouble.rollout(prompt(label="fine"), n_samples_per_prompt=1)
    assert (
        trajectory.failure is Failure.ENGINE
        and trajectory.error == "the engine ended a sample: error"
    )


answer_well = answer


def test_episodes_in_the_same_process_survive_the_one_that_ends_it(trouble: Stand) -> None:
    labels = ["pause", "crash", "pause", "fine"]
    prompts = [prompt(index=i, label=label) for i, label in enumerate(labels)]
    finished = trouble.rollout(*prompts, n_samples_per_prompt=1, seed=9)
    again = trouble.rollout(
        *(p for p in prompts if p.label != "crash"), n_samples_per_prompt=1, seed=9
    )
    assert [t.failure for t in finished] == [None, Failure.EXIT, None, None]
    assert [t.tokens for t in finished if not t.failed] == [t.tokens for t in again]


@pytest.fixture(scope="module")
def clients(logs: Path) -> Iterator[Stand]:
    stand = Stand("openai_client.py", logs / "clients", tokenizer=calculator_tokenizer())
    yield stand
    stand.close()


def test_an_agent_that_knows_only_an_openai_client_is_recorded_token_by_token(
    clients: Stand,
) -> None:
    clients.engine.asked.clear()
    for trajectory in clients.rollout(*(prompt(f"{i}+3", "talk", index=i) for i in range(4))):
        assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (
            1.0,
            0.5,
            {"turns": 3.0},
        ), trajectory.error
        first, second, third = sampled_pieces(trajectory)
        text = calculator_tokenizer().decode(trajectory.tokens)
        assert text.startswith(f"<|user|>{trajectory.prompt.text}<|end|><|assistant|>")
        assert text.count("<|user|>+1<|end|><|assistant|>") == 2
        for piece, calls in zip(
            (first, second, third), of_episode(clients.engine, trajectory), strict=True
        ):
            tokens, params = calls
            expected = answer(tokens, params)
            assert trajectory.tokens[: len(tokens)] == tokens
            assert (
                trajectory.tokens[len(tokens) : len(tokens) + len(piece)]
                == piece
                == expected.tokens
            )
            assert (
                trajectory.rollout_logprobs[len(tokens) : len(tokens) + len(piece)]
                == expected.logprobs
            )


def of_episode(engine: Engine, trajectory: Trajectory) -> list[tuple[list[int], SamplingParams]]:
    """The samples that an episode asked for, by their seeds."""
    seeds = [spec().seed_of(trajectory.prompt, trajectory.sample_index, turn) for turn in range(3)]
    return [next(asked for asked in engine.asked if asked[1].seed == seed) for seed in seeds]


def test_conversations_of_an_episode_are_recorded_token_by_token(clients: Stand) -> None:
    clients.engine.asked.clear()
    [trajectory] = clients.rollout(prompt("1+3", "summarise"), n_samples_per_prompt=1)
    assert (trajectory.reward, trajectory.turns, len(trajectory.conversations)) == (1.0, 3, 2), (
        trajectory.error
    )
    first, second = trajectory.conversations
    assert second.tokens == clients.engine.asked[2][0] + answer(*clients.engine.asked[2]).tokens
    for conversation, turns in ((first, (0, 1)), (second, (2,))):
        sampled = [answer(*clients.engine.asked[turn]) for turn in turns]
        chosen = [
            p
            for p, acted in zip(
                conversation.rollout_logprobs, conversation.action_mask, strict=True
            )
            if acted
        ]
        assert chosen == [logprob for sample in sampled for logprob in sample.logprobs]


@pytest.mark.parametrize("label", ["stream", "look", "err"])
def test_the_endpoint_does_what_stock_clients_expect(clients: Stand, label: str) -> None:
    for trajectory in clients.rollout(prompt("1+3=", label)):
        assert trajectory.reward is not None and trajectory.reward >= 1, trajectory.error


class StuckEngine(Engine):
    """Answers the first turn of an episode, and none that follows."""

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        if tokens.count(calculator_tokenizer().convert_tokens_to_ids("<|user|>")) > 1:
            await asyncio.sleep(1000)
        return await super().generate(key, tokens, params)


def test_requests_that_a_client_gave_up_end_with_the_episode(clients: Stand) -> None:
    engines = clients.generator.engines
    clients.generator.engines = StuckEngine()
    try:
        for index in range(2):
            [trajectory] = clients.rollout(
                prompt("1+3", "give_up", index=index), n_samples_per_prompt=1
            )
            assert trajectory.reward == 0, (
                trajectory.error
            )  # requests of earlier episodes that are still under way
    finally:
        clients.generator.engines = engines


def test_an_agent_may_put_a_server_of_its_own_in_a_thread_before_the_first_engine_it_saw(
    logs: Path,
) -> None:
    """Nobody knows which episode such a request is of: its tokens tell, and its log-probabilities
    are the engine's.
    """
    stand = Stand("own_server.py", logs / "server")
    for round in range(
        2
    ):  # the engine of the first episode still answers when that episode is over
        stand.engine.asked.clear()
        episodes = stand.rollout(
            *(prompt(f"{i}+3=", index=4 * round + i) for i in range(4)), n_samples_per_prompt=2
        )
        asked = [(tokens, answer(tokens, params)) for tokens, params in stand.engine.asked]
        assert len(asked) == 16 and len({params.seed for _, params in stand.engine.asked}) == 16
        for episode in episodes:
            assert (episode.reward, episode.weight_versions) == (1.0, (3,)), episode.error
            for end in ends_of_actions(episode):
                start = len(episode.tokens[:end]) - episode.action_mask[:end][::-1].index(False)
                given = [
                    sample.logprobs for tokens, sample in asked if tokens == episode.tokens[:start]
                ]
                assert episode.rollout_logprobs[start:end] in given
    stand.close()


def test_an_agent_that_never_asks_the_policy_has_failed(clients: Stand) -> None:
    [trajectory] = clients.rollout(prompt("1+3=", "silent"), n_samples_per_prompt=1)
    assert trajectory.failed and "made no request to its session" in str(trajectory.error)


class FailingEngine(Engine):
    """Raises what it is told to instead of answering."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        raise self.error


def test_a_request_that_the_engine_refuses_is_the_agents_affair_and_a_dead_engine_is_not(
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


def test_refusals_can_be_caught_and_numbers_of_other_libraries_are_numbers(own_loop: Stand) -> None:
    own_loop.engine.asked.clear()
    [trajectory] = own_loop.rollout(prompt(label="own"), n_samples_per_prompt=1)
    [(_, params)] = own_loop.engine.asked
    assert (type(params.temperature), params.temperature, trajectory.reward) == (float, 0.5, 1.0)


def test_an_agent_asks_a_remote_engine_and_its_failures_are_the_servers(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote_engines.VARIABLE, "")
    with openai_server() as server:
        remote_engines.offer_engines(
            RemoteEnginesConfig(remote_engines=(f"helper={server.url}",)),
            RuleConfig(timeout=2, retries=1),
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
        ("no observation", "Game.reset returned None, not a dict with the text observation"),
        (
            "none",
            "Game.step returned None; it must return a dict with rewards, environment_feedback and done",
        ),
        ("no rewards", "Game.step returned no rewards; it must"),
        ("no done", "Game.step returned no done; it must"),
        ("done in words", "Game.step returned done 'no', which is neither True nor False"),
        ("two rewards", "Game.step returned rewards [1.0, 2.0], which is not one number"),
        ("list", "Game.step returned environment_feedback ['no', 3], which is not text"),
        ("reward as text", "Game.step returned rewards '1.0', which is not one number"),
        ("images", "Game.step returned environment_images; the policy reads text only"),
    ],
)
def test_what_an_environment_must_not_return_is_told_without_our_frames(
    mistakes: Stand, label: str, words: str
) -> None:
    [failed] = mistakes.rollout(prompt(label=label), n_samples_per_prompt=1)
    assert failed.failure is Failure.RESULT
    assert words in str(failed.error) and "agent_files/mistakes.py" in str(failed.error)
    assert "Traceback" not in str(failed.error)


def test_methods_of_an_environment_need_not_be_coroutines(mistakes: Stand) -> None:
    [trajectory] = mistakes.rollout(prompt(label="well"), n_samples_per_prompt=1)
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("hot", "sampling_params.temperature is 'hot', which is no number"),
        ("huge numbers", f"sampling_params.seed is {2**70}, which is no integer of 64 bits"),
    ],
)
def test_sampling_parameters_that_are_no_numbers_are_named(
    mistakes: Stand, label: str, words: str
) -> None:
    [failed] = mistakes.rollout(prompt(label=label), n_samples_per_prompt=1)
    assert words in str(failed.error)
