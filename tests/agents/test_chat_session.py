"""A chat is kept as tokens: what the policy said is never rendered or tokenised again, and the rest
is exactly the template's.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.agents.calculator_task import CALL, CALLED, TEMPLATE, calculator_tokenizer
from openrlhf.agents.answers import CompletionOutput
from openrlhf.agents.chat_session import (
    ChatMistake,
    ChatSession,
    ContextFull,
    asked_for,
    parse_reply,
)
from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor

TOKENIZER = calculator_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
TEXT = st.text("0123456789+", max_size=6)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def sampled(text: str, *, finish: str = "stop") -> CompletionOutput:
    tokens = ids(text + ("<|end|>" if finish == "stop" else ""))
    return CompletionOutput(
        index=0, text=text, token_ids=tokens, logprobs=None, finish_reason=finish, stop_reason=None
    )


class Client(OpenAIAgentExecutor):
    def run_agent(self, prompt: str, label: Any, session_id: str) -> float:
        return 0.0


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@given(st.lists(st.tuples(TEXT, TEXT, st.sampled_from(["stop", "length"])), min_size=1, max_size=4))
def test_the_tokens_of_a_session_are_the_template_around_what_was_sampled(
    turns: list[tuple[str, str, str]],
) -> None:
    session = ChatSession(TOKENIZER, 10_000)
    messages: list[dict[str, Any]] = []
    expected: list[int] = []
    for question, said, finish in turns:
        messages.append(user(question))
        expected += ids(f"<|user|>{question}<|end|><|assistant|>")
        prompt = session.prompt_for(asked_for(messages))
        assert prompt == expected
        output = sampled(said, finish=finish)
        messages.append(session.heard(prompt, output, tools=False))
        assert session.tokens == [*expected, *output.token_ids]
        assert session.ranges[-1] == (len(expected), len(session.tokens))
        expected = [*session.tokens, *([] if finish == "stop" else ids("<|end|>"))]
    assert not session.notices


def test_a_request_that_was_not_answered_may_be_made_again() -> None:
    session = ChatSession(TOKENIZER, 1000)
    reply = session.heard(session.prompt_for(asked_for([user("2+3")])), sampled("5"), tools=False)
    asked = [user("2+3"), reply, user("4")]
    assert session.prompt_for(asked_for(asked)) == session.prompt_for(
        asked_for(asked)
    )  # the first time, the engine refused
    assert session.prompt_for(asked_for([user("2+3"), reply, user("7")]))[-3:] == ids(
        "7<|end|><|assistant|>"
    )


def test_what_stopped_a_reply_stays_in_its_tokens_and_is_not_shown() -> None:
    session = ChatSession(TOKENIZER, 1000)
    output = replace(sampled("12+", finish="length"), finish_reason="stop", stop_reason="+")
    twice = replace(
        sampled("1++", finish="length"), finish_reason="stop", stop_reason="+"
    )  # of a token that holds two
    other = ChatSession(TOKENIZER, 1000)
    assert (
        other.heard(other.prompt_for(asked_for([user("2")], TOOLS)), twice, tools=True)["content"]
        == "1"
    )
    reply = session.heard(session.prompt_for(asked_for([user("2")])), output, tools=False)
    assert reply["content"] == "12"
    assert session.tokens[-3:] == ids("12+")
    assert session.prompt_for(asked_for([user("2"), reply, user("4")]))[-5:] == ids(
        "<|end|><|user|>4<|end|><|assistant|>"
    )


def test_the_parts_of_a_text_are_its_text_and_other_parts_are_refused() -> None:
    session = ChatSession(TOKENIZER, 1000)
    asked = {
        "role": "user",
        "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3"}],
    }
    prompt = session.prompt_for(asked_for([asked]))
    assert prompt == ids("<|user|>2+3<|end|><|assistant|>")
    session.heard(prompt, sampled("5"), tools=False)
    echoed = {"role": "assistant", "content": [{"type": "text", "text": "5"}]}
    assert session.prompt_for(asked_for([asked, echoed, user("4")]))[: len(prompt)] == prompt
    with pytest.raises(ChatMistake, match="parts of type 'image_url'; the policy reads text only"):
        session.prompt_for(
            asked_for(
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
            )
        )


def test_a_template_that_wants_to_see_the_call_before_its_result_gets_to() -> None:
    tokenizer = calculator_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m['role'] == 'tool' and not messages[loop.index0 - 1].get('tool_calls') %}"
        "{{ raise_exception('a tool result must follow a tool call') }}{% endif %}",
    )
    plain, strict = ChatSession(TOKENIZER, 1000), ChatSession(tokenizer, 1000)
    prompts = []
    for session in (plain, strict):
        prompt = session.prompt_for(asked_for([user("2+3")], TOOLS))
        reply = session.heard(prompt, sampled(f"{CALL}2+3{CALLED}"), tools=True)
        [made] = reply["tool_calls"]
        assert re.fullmatch("[0-9a-z]{9}", made["id"])
        result = {"role": "tool", "tool_call_id": made["id"], "content": "5"}
        prompts.append(session.prompt_for(asked_for([user("2+3"), reply, result], TOOLS)))
    assert prompts[0] == prompts[1] and prompts[0][-3:] == ids("5<|end|><|assistant|>")


def test_what_the_template_would_change_stays_as_it_was_sampled() -> None:
    """A template that strips what the assistant said, and another that shows none of it before the
    last turn.
    """
    tokenizer = calculator_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] | trim('1') }}"
    )
    session = ChatSession(tokenizer, 1000)
    prompt = session.prompt_for(asked_for([user("2+3")]))
    reply = session.heard(prompt, sampled("11511"), tools=False)
    assert reply["content"] == "11511"
    again = session.prompt_for(asked_for([user("2+3"), reply, user("4")]))
    assert again == ids("<|user|>2+3<|end|><|assistant|>11511<|end|><|user|>4<|end|><|assistant|>")


def test_calls_of_tools_are_read_from_the_text_and_their_results_follow() -> None:
    session = ChatSession(TOKENIZER, 1000)
    prompt = session.prompt_for(asked_for([user("2+3")], TOOLS))
    output = sampled(f"{CALL}2+3{CALLED}")
    reply = session.heard(prompt, output, tools=True)
    [call] = reply["tool_calls"]
    assert reply["content"] == ""
    [choice] = Client()._completion(prompt, output, reply, logprobs=False)["choices"]
    assert (choice["message"], choice["finish_reason"]) == (reply, "tool_calls")
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "2+3"}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    asked = session.prompt_for(asked_for([user("2+3"), {**reply, "refusal": None}, result], TOOLS))
    assert asked == ids(
        f"<|user|>2+3<|end|><|assistant|>{CALL}2+3{CALLED}<|end|><|tool|>5<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    "text", ["<tool_call>{no json}</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>", "5"]
)
def test_a_call_that_cannot_be_read_is_text(text: str) -> None:
    assert parse_reply(TOKENIZER, text) == {"role": "assistant", "content": text}


def test_several_calls_and_the_text_around_them_are_told_apart() -> None:
    text = f"ten {CALL}1{CALLED} and\n{CALL}2{CALLED}"
    message = parse_reply(TOKENIZER, text)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        '{"expression": "1"}',
        '{"expression": "2"}',
    ]
    assert message["content"] == "ten  and"
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_response_template_of_the_tokenizer_is_used() -> None:
    """It reads the calls otherwise than we would: here they stand between other marks."""
    tokenizer = calculator_tokenizer()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open": "call",
                "close": "end",
                "repeats": True,
                "content": "text",
                "transform": {
                    "type": "function",
                    "function": {"name": "calculator", "arguments": "{content}"},
                },
            },
            "content": {"close": "<|end|>", "content": "text"},
        },
    }
    session = ChatSession(tokenizer, 1000)
    prompt = session.prompt_for(asked_for([user("2+3")], TOOLS))
    reply = session.heard(prompt, sampled("socall2+3end"), tools=True)
    assert [call["function"] for call in reply["tool_calls"]] == [
        {"name": "calculator", "arguments": "2+3"}
    ]
    assert reply["content"] == "so"


@pytest.mark.parametrize(
    "messages",
    [
        [user("other"), {"role": "assistant", "content": "5"}, user("4")],
        [user("2+3"), {"role": "assistant", "content": "6"}, user("4")],
        [user("2+3")],
        [user("4")],
    ],
)
def test_messages_that_do_not_continue_the_conversation_are_refused(
    messages: list[dict[str, Any]],
) -> None:
    session = ChatSession(TOKENIZER, 1000)
    session.heard(session.prompt_for(asked_for([user("2+3")])), sampled("5"), tools=False)
    with pytest.raises(ChatMistake, match="does not continue the conversation"):
        session.prompt_for(asked_for(messages))


def test_a_full_context_is_refused_and_the_session_is_truncated() -> None:
    session = ChatSession(TOKENIZER, 12)
    reply = session.heard(session.prompt_for(asked_for([user("2+3")])), sampled("5"), tools=False)
    with pytest.raises(ContextFull, match=r"--data\.max_len 12"):
        session.prompt_for(asked_for([user("2+3"), reply, user("4")]))
    assert session.truncated and session.ranges == [(6, 8)]


@pytest.mark.parametrize("messages", [None, [], [{"role": "user"}], [{"content": "x"}], 5])
def test_malformed_messages_are_told_of(messages: Any) -> None:
    with pytest.raises(ChatMistake, match="messages"):
        ChatSession(TOKENIZER, 100).prompt_for(asked_for(messages))
