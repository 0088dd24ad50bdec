"""Prompts built by the OpenAI endpoint for a real client, and prompts built for environments.

Every prompt equals the full rendered conversation, or a notice reports where the prompt differs.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from typing import Any, get_args

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import APIStatusError, AsyncOpenAI
from openai.types.chat.completion_create_params import CompletionCreateParams
from transformers import PreTrainedTokenizerBase

from openrlhf.agents.answers import CompletionOutput, EngineRefusal, Logprob, RequestOutput
from openrlhf.agents.assembly import assemble
from openrlhf.agents.chat_request import WITHOUT_EFFECT, reason_of
from openrlhf.agents.contract import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor
from openrlhf.agents.program import own_params
from openrlhf.rollout.sampling import SamplingParams
from tests.agents.tokenizers import CHATML, TEMPLATES, TOKENIZERS, ZEPHYR

MAX_LENGTH = 4000
ZEBRA = {
    "type": "function",
    "function": {"name": "zebra", "parameters": {"type": "object", "properties": {}}},
}
WORDS = st.text("ab .\n<é", max_size=8)


def chat_tokenizer(kind: str, template: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(TOKENIZERS[kind]())
    tokenizer.chat_template = template
    return tokenizer


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(kw_only=True)
class ScriptedEngine:
    """An engine that returns scripted samples: tokens and a finish reason."""

    tokenizer: PreTrainedTokenizerBase
    script: list[tuple[list[int], str]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    max_tokens: list[int | None] = field(default_factory=list)

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any = None, multi_modal_data: Any = None
    ) -> RequestOutput:
        tokens, finish = [*ids(self.tokenizer, "ab"), self.end], "stop"
        if self.script:
            tokens, finish = self.script.pop(0)
        limit = sampling_params.max_tokens or len(tokens)
        if len(tokens) > limit:
            tokens, finish = tokens[:limit], "length"
        self.prompts.append(prompt_token_ids)
        self.samples.append(tokens)
        self.max_tokens.append(sampling_params.max_tokens)
        logprobs = [{token: Logprob(logprob=-0.5)} for token in tokens]
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=None,
        )
        return RequestOutput(prompt_token_ids=prompt_token_ids, outputs=[output])

    @property
    def end(self) -> int:
        return self.tokenizer.eos_token_id  # type: ignore[return-value]


def whole_prompt(engine: ScriptedEngine, messages: list[Any], **options: Any) -> list[int]:
    text = engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    return ids(engine.tokenizer, str(text))


class Agent(OpenAIAgentExecutor):
    """An executor that runs a test's coroutine with an OpenAI client for the session."""

    def __init__(self, conversation: Any) -> None:
        super().__init__()
        self.conversation = conversation

    async def run_agent(self, prompt: str, label: Any, session_id: str) -> float:
        async with AsyncOpenAI(
            base_url=self.session_url(session_id), api_key="none", max_retries=0
        ) as client:
            await self.conversation(client)
        return 1.0


def play(
    engine: ScriptedEngine, conversation: Any, *, max_tokens: int | None = None
) -> dict[str, Any]:
    """Run an episode whose agent is the coroutine `conversation(client)`, and return the result."""

    async def episode() -> dict[str, Any]:
        agent = Agent(conversation)
        try:
            return await agent.execute(
                "", "", SamplingParams(max_tokens=max_tokens), MAX_LENGTH, engine.tokenizer, engine
            )
        finally:
            if agent._serving:
                agent._serving.cancel()
                await asyncio.gather(agent._serving, return_exceptions=True)

    return asyncio.run(episode())


def refusal_of(conversation: Any, engine: ScriptedEngine) -> APIStatusError:
    """Return the API error that ends a conversation."""
    seen: list[APIStatusError] = []

    async def asks(client: AsyncOpenAI) -> None:
        await say(client, [user("a")])
        try:
            await conversation(client)
        except APIStatusError as error:
            seen.append(error)

    play(engine, asks)
    [error] = seen
    assert isinstance(error.body, dict)
    assert error.body.keys() == {"message", "type", "param", "code"}
    return error


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def say(client: AsyncOpenAI, messages: list[Any], **more: Any) -> dict[str, Any]:
    """Send a request, and return the reply as a message that the next request can include."""
    if not more.get("stream"):
        answer = await client.chat.completions.create(model="policy", messages=messages, **more)
        return answer.choices[0].message.model_dump(exclude_none=True)
    reply: dict[str, Any] = {"role": "assistant", "content": ""}
    async for event in await client.chat.completions.create(
        model="policy", messages=messages, **more
    ):
        for choice in event.choices:
            reply["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                reply.setdefault("tool_calls", []).append(
                    call.model_dump(exclude_none=True, exclude={"index"})
                )
    return reply


# The property


def spans_match(whole: list[int], context: list[int], sampled: list[bool]) -> bool:
    """Return whether `whole` equals the context apart from the tokens of each sampled run."""
    pieces: list[list[int]] = [[]]
    after_sampled = False
    for token, is_sampled in zip(context, sampled, strict=True):
        if after_sampled and not is_sampled:
            pieces.append([])
        if not is_sampled:
            pieces[-1].append(token)
        after_sampled = is_sampled
    if len(pieces) == 1:
        return whole == pieces[0]
    place = len(pieces[0])
    if whole[:place] != pieces[0]:
        return False
    for piece in pieces[1:-1]:
        while whole[place : place + len(piece)] != piece:
            place += 1
            if place > len(whole):
                return False
        place += len(piece)
    end = len(whole) - len(pieces[-1])
    return place <= end and whole[end:] == pieces[-1]


@dataclass(kw_only=True)
class Request:
    """A request's messages and options. `before` lists indices of the earlier turns."""

    messages: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)


def check_prompts(engine: ScriptedEngine, requests: list[Request], notices: dict[str, str]) -> None:
    """Assert that prompts keep sampled tokens.

    A prompt without a notice must equal the full rendering.
    """
    for turn, request in enumerate(requests):
        prompt = engine.prompts[turn]
        sampled = [False] * len(prompt)
        for before in request.before:
            start = len(engine.prompts[before])
            end = start + len(engine.samples[before])
            assert prompt[:end] == [*engine.prompts[before], *engine.samples[before]]
            sampled[start:end] = [True] * (end - start)
        whole = whole_prompt(engine, request.messages, **request.options)
        if not spans_match(whole, prompt, sampled):
            assert notices, engine.tokenizer.convert_ids_to_tokens(prompt)


@st.composite
def replies(draw: st.DrawFn, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
    """Draw a sample: tokenized normally or by character, and with an end token or truncated."""
    special = st.sampled_from(["ab! c", '<tool_call>{"name": "zebra"}</tool_call>'])
    text = draw(st.one_of(WORDS, special))
    tokens: list[int] = []
    if draw(st.booleans()):
        tokens += ids(tokenizer, text)
    else:
        for character in text:
            tokens += ids(tokenizer, character)
    finish = draw(st.sampled_from(["stop", "stop", "length"]))
    if finish == "stop":
        tokens.append(tokenizer.eos_token_id)  # type: ignore[arg-type]
    return tokens or ids(tokenizer, "a"), finish


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_prompt_is_the_full_rendered_template_or_comes_with_a_notice(
    data: st.DataObject,
) -> None:
    kind = data.draw(st.sampled_from(sorted(TOKENIZERS)))
    template = data.draw(st.sampled_from(sorted(TEMPLATES)))
    tokenizer = chat_tokenizer(kind, TEMPLATES[template])
    script = data.draw(st.lists(replies(tokenizer), min_size=1, max_size=4))
    engine = ScriptedEngine(tokenizer=tokenizer, script=list(script))
    asked = data.draw(st.lists(WORDS, min_size=len(script), max_size=len(script)))
    streamed = data.draw(st.booleans())
    tools = data.draw(st.sampled_from([None, [ZEBRA]]))
    restarts = data.draw(st.lists(st.booleans(), min_size=len(script), max_size=len(script)))
    options = {"tools": tools} if tools else {}
    streaming = {"stream": True} if streamed else {}
    requests: list[Request] = []

    async def conversation(client: AsyncOpenAI) -> None:
        messages: list[Any] = []
        before: list[int] = []
        for turn, text in enumerate(asked):
            if restarts[turn]:
                messages, before = [], []
            messages.append(user(f"{text}{turn}"))
            request = Request(
                messages=copy.deepcopy(messages), options=options, before=list(before)
            )
            requests.append(request)
            messages.append(await say(client, messages, **options, **streaming))
            before.append(turn)

    result = play(engine, conversation)
    check_prompts(engine, requests, result["notices"])
    conversations = [*result["earlier"], result]
    assert len(conversations) == 1 + sum(restarts[1:])
    turns = [len(conversation["action_ranges"]) for conversation in conversations]
    assert sum(turns) == len(script)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("template", [CHATML, ZEPHYR])
def test_template_with_end_markers_is_rendered_in_full_without_a_notice(
    kind: str, template: str
) -> None:
    tokenizer = chat_tokenizer(kind, template.replace("<|im_end|>", TOKENIZERS[kind]().eos_token))
    ended = ([*ids(tokenizer, "a b"), tokenizer.eos_token_id], "stop")
    cut = (ids(tokenizer, "a b"), "length")
    engine = ScriptedEngine(tokenizer=tokenizer, script=[ended, cut])
    requests: list[Request] = []

    async def conversation(client: AsyncOpenAI) -> None:
        messages: list[Any] = []
        for turn, text in enumerate(("ab", "b\na", " a")):
            messages.append(user(text))
            requests.append(Request(messages=copy.deepcopy(messages), before=list(range(turn))))
            messages.append(await say(client, messages))

    result = play(engine, conversation)
    assert not result["notices"]
    check_prompts(engine, requests, {})
    assert len(engine.prompts) == 3


# Request fields

READ = {
    "messages": [user("b")],
    "tools": [ZEBRA],
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "stop": "b",
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
}
# API fields with values that the endpoint does not support.
UNSUPPORTED: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "alloy"},
    "function_call": "auto",
    "functions": [{"name": "zebra"}],
    "logit_bias": {"5": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "b"},
    "prompt_cache_options": {"mode": "m"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "top_logprobs": 3,
    "verbosity": "low",
    "web_search_options": {},
}
OF_OTHER_SERVERS: dict[str, Any] = {
    "add_generation_prompt": False,
    "chat_template": "{{ messages }}",
    "continue_final_message": True,
    "guided_json": {},
    "ignore_eos": True,
    "min_tokens": 3,
    "prompt_logprobs": 1,
    "stop_token_ids": [5],
    "structured_outputs": {"choice": ["a"]},
    "nonsense": 1,
}


def fields_of_the_api() -> set[str]:
    names: set[str] = set()
    for kind in get_args(CompletionCreateParams):
        names |= set(kind.__annotations__)
        for base in kind.__orig_bases__:
            names |= set(getattr(base, "__annotations__", ()))
    return names


def test_every_api_field_is_either_used_or_ignored_or_rejected() -> None:
    assert fields_of_the_api() <= READ.keys() | WITHOUT_EFFECT | UNSUPPORTED.keys()


def byte_level_engine(*script: tuple[str, str]) -> ScriptedEngine:
    engine = ScriptedEngine(tokenizer=chat_tokenizer("byte-level", CHATML))
    for text, finish in script:
        tokens = ids(engine.tokenizer, text)
        if finish == "stop":
            tokens.append(engine.end)
        engine.script.append((tokens, finish))
    return engine


def test_error_names_the_unsupported_field() -> None:
    refused: dict[str, Any] = {}

    async def conversation(client: AsyncOpenAI) -> None:
        for name, value in (UNSUPPORTED | OF_OTHER_SERVERS).items():
            try:
                await say(client, [user("a")], extra_body={name: value})
            except APIStatusError as error:
                assert isinstance(error.body, dict) and name in error.body["message"]
                refused[name] = (error.status_code, error.body["param"], error.body["code"])
        await say(client, [user("a")])

    engine = byte_level_engine()
    play(engine, conversation)
    names = [*UNSUPPORTED, *OF_OTHER_SERVERS]
    assert refused == {name: (400, name, "invalid_request") for name in names}
    assert len(engine.prompts) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"messages": "text"}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
        ({"messages": None}, "messages"),
        ({"tools": "zebra"}, "tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_invalid_value_returns_an_error_in_the_api_format(
    changes: dict[str, Any], param: str
) -> None:
    async def asks(client: AsyncOpenAI) -> None:
        await say(client, [user("a")], extra_body=changes)

    error = refusal_of(asks, byte_level_engine())
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")


def test_malformed_body_or_unknown_path_returns_an_error_in_the_api_format() -> None:
    answers: dict[str, httpx.Response] = {}

    async def conversation(client: AsyncOpenAI) -> None:
        await say(client, [user("a")])
        root = str(client.base_url).rstrip("/")
        json_type = {"Content-Type": "application/json"}
        async with httpx.AsyncClient() as http:
            answers["json"] = await http.post(
                f"{root}/chat/completions", content="{", headers=json_type
            )
            answers["list"] = await http.post(f"{root}/chat/completions", json=[1])
            answers["empty"] = await http.post(f"{root}/chat/completions", json={})
            answers["path"] = await http.post(f"{root}/embeddings", json={})
            tokenize = root.removesuffix("/v1") + "/tokenize"
            answers["long"] = await http.post(tokenize, json={"prompt": "a" * 10_000_000})
            answers["neither"] = await http.post(tokenize, json={})

    play(byte_level_engine(), conversation)
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "json": 400, "list": 400, "empty": 400, "path": 404, "long": 400, "neither": 400,
    }  # fmt: skip
    for answer in answers.values():
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answers["long"].json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "words", "param"),
    [
        (
            {"type": "json_invalid", "loc": ("body", 12), "ctx": {"error": "Expecting value"}},
            ("not valid JSON", "Expecting value", "12"),
            None,
        ),
        ({"type": "missing", "loc": ("body", "messages")}, ("messages is missing",), "messages"),
        ({"type": "missing", "loc": ("body",)}, ("body", "JSON object"), None),
    ],
)
def test_message_about_a_malformed_body_gives_the_reason(
    error: dict[str, Any], words: tuple[str, ...], param: str | None
) -> None:
    message, field = reason_of([{"msg": "Field required", "input": {"model": "m"}, **error}])
    assert all(word in message for word in words) and "model" not in message
    assert field == param


def test_server_error_is_returned_in_the_api_format() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, *asked: Any, **more: Any) -> RequestOutput:
            if self.prompts:
                raise RuntimeError("out of order")
            return await super().generate(*asked, **more)

    async def asks(client: AsyncOpenAI) -> None:
        await say(client, [user("a"), {"role": "assistant", "content": "ab"}, user("b")])

    error = refusal_of(asks, Broken(tokenizer=chat_tokenizer("byte-level", CHATML)))
    assert (error.status_code, error.type) == (500, "server_error")


def test_default_values_of_unsupported_fields_are_accepted() -> None:
    neutral = {
        "n": 1,
        "top_logprobs": 0,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "logit_bias": {},
        "continue_final_message": False,
        "add_generation_prompt": True,
        "stream": None,
        "functions": None,
        "temperature": 0.3,
        "user": "me",
        "seed": 5,
    }

    async def conversation(client: AsyncOpenAI) -> None:
        await say(client, [user("a")], tools=[ZEBRA], extra_body=neutral)

    assert len(play(byte_level_engine(), conversation)["action_ranges"]) == 1


def test_chat_template_kwargs_reach_the_template() -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        await say(
            client, [user("a")], extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )

    engine = byte_level_engine()
    play(engine, conversation)
    shown = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert engine.prompts == [ids(engine.tokenizer, shown)]


@pytest.mark.parametrize(
    ("first", "second"), [(None, [ZEBRA]), ([ZEBRA], None), ([ZEBRA], [ZEBRA | {"type": "other"}])]
)
def test_changed_tools_start_a_new_conversation(first: Any, second: Any) -> None:
    requests: list[Request] = []

    async def conversation(client: AsyncOpenAI) -> None:
        messages: list[Any] = []
        for tools in (first, second):
            messages.append(user("a"))
            options = {"tools": tools} if tools else {}
            requests.append(Request(messages=copy.deepcopy(messages), options=options))
            messages.append(await say(client, messages, **options))

    engine = byte_level_engine()
    result = play(engine, conversation)
    assert engine.prompts == [
        whole_prompt(engine, each.messages, **each.options) for each in requests
    ]
    assert (len(result["earlier"]), list(result["notices"])) == (1, ["conversation"])


# Several conversations in one episode


def test_summary_starts_a_new_conversation_within_the_episode() -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("a")]
        for _ in range(2):
            messages += [await say(client, messages), user("b")]
        await say(client, [user("a"), user("so far: ab")])

    engine = byte_level_engine()
    result = play(engine, conversation)
    [earlier] = result["earlier"]
    assert len(earlier["action_ranges"]) == 2 and len(result["action_ranges"]) == 1
    assert earlier["observation_tokens"] == [*engine.prompts[1], *engine.samples[1]]
    assert result["observation_tokens"] == [*engine.prompts[2], *engine.samples[2]]
    assert engine.prompts[2] == whole_prompt(engine, [user("a"), user("so far: ab")])
    assert "conversation" in result["notices"]


def test_conversations_of_an_episode_can_alternate() -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        chats: list[list[Any]] = [[user("a")], [user("b")], [user("a"), user("b")]]
        for _ in range(2):
            for messages in chats:
                messages += [await say(client, messages), user("b a")]

    engine = byte_level_engine(*[(text, "stop") for text in ("a", "b", "ab", "ba", "a b", "b a")])
    result = play(engine, conversation)
    for first, second in ((0, 3), (1, 4), (2, 5)):
        assert engine.prompts[second][: len(engine.prompts[first])] == engine.prompts[first]
    assert [len(each["action_ranges"]) for each in (*result["earlier"], result)] == [2, 2, 2]


def test_rejected_request_starts_no_conversation_and_truncates_the_episode() -> None:
    refused: list[str | None] = []

    async def conversation(client: AsyncOpenAI) -> None:
        await say(client, [user("a")])
        try:
            await say(client, [user("b " * MAX_LENGTH)])
        except APIStatusError as error:
            refused.append(error.code)

    result = play(byte_level_engine(), conversation)
    assert refused == ["context_length_exceeded"]
    assert result["earlier"] == [] and result["truncated"]


def test_tool_calls_remain_text_with_tool_choice_none() -> None:
    call = '<tool_call>{"name": "zebra", "arguments": {}}</tool_call>'
    messages: list[dict[str, Any]] = []

    async def conversation(client: AsyncOpenAI) -> None:
        messages.append(await say(client, [user("a")], tools=[ZEBRA], tool_choice="none"))

    engine = byte_level_engine((call, "stop"))
    play(engine, conversation)
    assert messages == [{"role": "assistant", "content": call}]
    assert "zebra" in str(engine.tokenizer.decode(engine.prompts[0]))


def test_streamed_response_has_logprobs_usage_and_tool_calls() -> None:
    events: list[Any] = []

    async def conversation(client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="policy",
            messages=[user("a")],
            tools=[ZEBRA],
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        events.extend([event async for event in stream])

    engine = byte_level_engine(
        ('b <tool_call>{"name": "zebra", "arguments": {}}</tool_call>', "stop")
    )
    play(engine, conversation)
    reply, usage = events
    assert [call.function.name for call in reply.choices[0].delta.tool_calls] == ["zebra"]
    assert len(reply.choices[0].logprobs.content) == len(engine.samples[0])
    assert reply.choices[0].finish_reason == "tool_calls"
    assert usage.choices == [] and usage.usage.completion_tokens == len(engine.samples[0])


@pytest.mark.parametrize(
    ("of_run", "of_request", "truncated"),
    [(None, 1, False), (2, 1, False), (1, None, True), (1, 5, True), (1, 1, True)],
)
def test_client_episode_is_truncated_only_by_the_limits_of_the_run(
    of_run: int | None, of_request: int | None, truncated: bool
) -> None:
    async def conversation(client: AsyncOpenAI) -> None:
        await say(client, [user("a")], **({"max_tokens": of_request} if of_request else {}))

    engine = byte_level_engine(("a b a b", "length"))
    assert play(engine, conversation, max_tokens=of_run)["truncated"] is truncated


# Environments


def play_game(
    engine: ScriptedEngine,
    feedback: Any,
    *,
    turns: int,
    max_tokens: int | None = None,
    then: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run an episode whose environment responds with `feedback(states)`.

    `then` is the value of `max_tokens` after the first turn. Returns the result, and the states
    that each step received.
    """
    received: list[dict[str, Any]] = []

    class Game(AgentInstanceBase):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            received.append(states)
            params = states["sampling_params"]
            params.max_tokens = then or params.max_tokens
            done = len(received) == turns
            text = "" if done else feedback(states)
            return {
                "rewards": 0.0,
                "environment_feedback": text,
                "done": done,
                "sampling_params": params,
            }

    executor = MultiTurnAgentExecutor(Game)
    params = SamplingParams(max_tokens=max_tokens)
    result = asyncio.run(
        executor.execute("go ab", "", params, MAX_LENGTH, engine.tokenizer, engine)
    )
    return result, received


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_feedback_continues_the_preceding_tokens_or_comes_with_a_notice(
    data: st.DataObject,
) -> None:
    tokenizer = chat_tokenizer(data.draw(st.sampled_from(sorted(TOKENIZERS))), CHATML)
    script = data.draw(st.lists(replies(tokenizer), min_size=2, max_size=3))
    engine = ScriptedEngine(tokenizer=tokenizer, script=list(script))
    feedback = data.draw(WORDS)
    result, _ = play_game(engine, lambda states: feedback, turns=len(script))
    for turn in range(1, len(script)):
        before = [*engine.prompts[turn - 1], *engine.samples[turn - 1]]
        new = engine.prompts[turn][len(before) :]
        assert engine.prompts[turn][: len(before)] == before
        whole = ids(tokenizer, str(tokenizer.decode(before)) + feedback)
        assert whole[len(whole) - len(new) :] == new or result["notices"]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_feedback_after_an_end_token_is_tokenized_as_in_the_full_text(kind: str) -> None:
    tokenizer = chat_tokenizer(kind, CHATML)
    engine = ScriptedEngine(
        tokenizer=tokenizer, script=[([*ids(tokenizer, "a b"), tokenizer.eos_token_id], "stop")]
    )
    result, _ = play_game(engine, lambda states: "\nab<", turns=2)
    whole = ids(tokenizer, f"go ab{tokenizer.eos_token}\nab<")
    new = whole[whole.index(tokenizer.eos_token_id) + 1 :]
    assert engine.prompts[1] == [*engine.prompts[0], *engine.samples[0], *new]
    assert not result["notices"]


def test_environment_receives_finish_reason_and_end_text() -> None:
    engine = byte_level_engine(("a", "stop"), ("b", "length"))
    _, (first, second) = play_game(engine, lambda states: "\n", turns=2)
    assert (first["action_text"], first["finish_reason"]) == ("a", "stop")
    assert first["end_text"] == "<|im_end|>"
    assert (second["action_text"], second["finish_reason"]) == ("b", "length")
    assert second["end_text"] == ""


@pytest.mark.parametrize(("finish", "noticed"), [("stop", True), ("length", False)])
def test_feedback_does_not_repeat_end_text_sampled_by_the_policy(
    finish: str, noticed: bool
) -> None:
    engine = byte_level_engine(("a", finish))
    result, _ = play_game(engine, lambda states: "<|im_end|>\n", turns=2)
    assert engine.prompts[1] == [*engine.prompts[0], *ids(engine.tokenizer, "a<|im_end|>\n")]
    assert bool(result["notices"]) is noticed


@pytest.mark.parametrize(
    ("of_run", "of_step", "truncated"),
    [(None, 1, False), (3, 1, False), (1, 1, True), (2, None, True)],
)
def test_environment_episode_is_truncated_only_by_the_limits_of_the_run(
    of_run: int | None, of_step: int | None, truncated: bool
) -> None:
    engine = byte_level_engine(("a", "stop"), ("a b a b", "length"))
    result, _ = play_game(engine, lambda states: "b", turns=2, max_tokens=of_run, then=of_step)
    assert result["truncated"] is truncated


def test_multi_turn_executor_returns_logprobs_from_a_custom_engine_of_a_subclass() -> None:
    engine = byte_level_engine(("a", "stop"), ("b", "stop"))
    result, _ = play_game(engine, lambda states: "\n", turns=2)
    assert result["scores"] == result["reward"]
    vocabulary = len(engine.tokenizer)
    builder = assemble(result, [], MAX_LENGTH, vocabulary=vocabulary).builder
    expected = [-0.5 if sampled else 0.0 for sampled in builder.action_mask]
    assert builder.rollout_logprobs == expected and sum(builder.action_mask) == 4


def test_difference_in_spaces_is_reported_in_a_separate_notice() -> None:
    """Each kind of notice is logged only once in a run."""
    engine = byte_level_engine(("a ", "stop"), ("b.a", "stop"), ("a", "stop"))
    shown = "m['content'].split('.')[-1] | trim"
    engine.tokenizer.chat_template = CHATML.replace("m['content']", shown)

    async def conversation(client: AsyncOpenAI) -> None:
        messages: list[Any] = []
        for _ in range(3):
            messages.append(user("a"))
            messages.append(await say(client, messages))

    notices = play(engine, conversation)["notices"]
    assert list(notices) == ["spaces", "template"]


def test_sampling_params_accept_attributes_that_have_no_effect() -> None:
    params = SamplingParams(temperature=0.5)
    params.n = 1  # type: ignore[attr-defined]
    params.bad_words = []  # type: ignore[attr-defined]
    params.prompt_logprobs = None  # type: ignore[attr-defined]
    assert own_params(params) == SamplingParams(temperature=0.5)
    params.n = 2  # type: ignore[attr-defined]
    with pytest.raises(EngineRefusal, match=r"\bn\b"):
        own_params(params)
