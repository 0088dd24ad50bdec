"""Conversations stored as tokens.

Replies are never rendered or tokenized again. All other text is exactly what the template renders.
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
from openrlhf.agents.conversation import (
    ChatMistake,
    ContextFull,
    Conversation,
    parse_reply,
    template_inputs,
)
from openrlhf.agents.openai_endpoint import completion

TOKENIZER = calculator_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
TEXT = st.text("0123456789+", max_size=6)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def sampled(text: str, *, finish: str = "stop") -> CompletionOutput:
    tokens = ids(text)
    if finish == "stop":
        tokens += ids("<|end|>")
    return CompletionOutput(
        index=0, text=text, token_ids=tokens, logprobs=None, finish_reason=finish, stop_reason=None
    )


def stopped_by(stop_string: str, text: str) -> CompletionOutput:
    """Return a sample that ended with a stop string."""
    return replace(sampled(text, finish="length"), finish_reason="stop", stop_reason=stop_string)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def started(conversation: Conversation, question: str, answer: str) -> dict[str, Any]:
    """Send the first question of a conversation and return the reply."""
    conversation.prompt_for(template_inputs([user(question)]))
    return conversation.add_reply(sampled(answer), tools=False)


@given(st.lists(st.tuples(TEXT, TEXT, st.sampled_from(["stop", "length"])), min_size=1, max_size=4))
def test_conversation_tokens_are_template_text_around_sampled_replies(
    turns: list[tuple[str, str, str]],
) -> None:
    conversation = Conversation(TOKENIZER, 10_000)
    messages: list[dict[str, Any]] = []
    expected: list[int] = []
    for question, reply, finish in turns:
        messages.append(user(question))
        expected += ids(f"<|user|>{question}<|end|><|assistant|>")
        prompt = conversation.prompt_for(template_inputs(messages))
        assert prompt == expected
        output = sampled(reply, finish=finish)
        messages.append(conversation.add_reply(output, tools=False))
        assert conversation.tokens == [*expected, *output.token_ids]
        assert conversation.ranges[-1] == (len(expected), len(conversation.tokens))
        expected = list(conversation.tokens)
        if finish == "length":
            expected += ids("<|end|>")
    assert not conversation.notices


def test_unanswered_request_can_be_repeated_or_replaced() -> None:
    conversation = Conversation(TOKENIZER, 1000)
    reply = started(conversation, "2+3", "5")
    inputs = template_inputs([user("2+3"), reply, user("4")])
    prompt = conversation.prompt_for(inputs)  # no reply follows, as if the request was rejected
    assert conversation.prompt_for(inputs) == prompt
    other = template_inputs([user("2+3"), reply, user("7")])
    assert conversation.mismatch(other) is None
    assert conversation.prompt_for(other)[-3:] == ids("7<|end|><|assistant|>")


def test_stop_string_is_kept_in_the_tokens_but_not_in_the_reply() -> None:
    conversation = Conversation(TOKENIZER, 1000)
    conversation.prompt_for(template_inputs([user("2")]))
    reply = conversation.add_reply(stopped_by("+", "12+"), tools=False)
    assert reply["content"] == "12"
    assert conversation.tokens[-3:] == ids("12+")
    prompt = conversation.prompt_for(template_inputs([user("2"), reply, user("4")]))
    assert prompt[-5:] == ids("<|end|><|user|>4<|end|><|assistant|>")


def test_reply_with_tools_ends_before_the_first_stop_string() -> None:
    """A single token can contain the stop string twice."""
    conversation = Conversation(TOKENIZER, 1000)
    conversation.prompt_for(template_inputs([user("2")], TOOLS))
    reply = conversation.add_reply(stopped_by("+", "1++"), tools=True)
    assert reply["content"] == "1"


def test_text_parts_are_joined_and_other_content_parts_are_rejected() -> None:
    conversation = Conversation(TOKENIZER, 1000)
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3"}]
    question = {"role": "user", "content": parts}
    prompt = conversation.prompt_for(template_inputs([question]))
    assert prompt == ids("<|user|>2+3<|end|><|assistant|>")
    conversation.add_reply(sampled("5"), tools=False)
    echoed = {"role": "assistant", "content": [{"type": "text", "text": "5"}]}
    inputs = template_inputs([question, echoed, user("4")])
    assert conversation.mismatch(inputs) is None
    assert conversation.prompt_for(inputs)[: len(prompt)] == prompt
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(ChatMistake, match="'image_url'") as refused:
        template_inputs([{"role": "user", "content": [image]}])
    assert refused.value.param == "messages"


def test_template_that_requires_a_call_before_its_result_receives_the_call() -> None:
    tokenizer = calculator_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}"
        "{% if m['role'] == 'tool' and not messages[loop.index0 - 1].get('tool_calls') %}"
        "{{ raise_exception('a tool result must follow a tool call') }}{% endif %}",
    )
    plain, strict = Conversation(TOKENIZER, 1000), Conversation(tokenizer, 1000)
    prompts = []
    for conversation in (plain, strict):
        conversation.prompt_for(template_inputs([user("2+3")], TOOLS))
        reply = conversation.add_reply(sampled(f"{CALL}2+3{CALLED}"), tools=True)
        [call] = reply["tool_calls"]
        assert re.fullmatch("[0-9a-z]{9}", call["id"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        inputs = template_inputs([user("2+3"), reply, result], TOOLS)
        prompts.append(conversation.prompt_for(inputs))
    assert prompts[0] == prompts[1]
    assert prompts[0][-3:] == ids("5<|end|><|assistant|>")


def test_reply_keeps_its_sampled_tokens_where_the_template_would_strip_them() -> None:
    tokenizer = calculator_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] | trim('1') }}"
    )
    conversation = Conversation(tokenizer, 1000)
    reply = started(conversation, "2+3", "11511")
    assert reply["content"] == "11511"
    prompt = conversation.prompt_for(template_inputs([user("2+3"), reply, user("4")]))
    assert prompt == ids("<|user|>2+3<|end|><|assistant|>11511<|end|><|user|>4<|end|><|assistant|>")


def test_tool_calls_are_parsed_from_the_reply_and_their_results_follow_it() -> None:
    conversation = Conversation(TOKENIZER, 1000)
    prompt = conversation.prompt_for(template_inputs([user("2+3")], TOOLS))
    output = sampled(f"{CALL}2+3{CALLED}")
    reply = conversation.add_reply(output, tools=True)
    [call] = reply["tool_calls"]
    assert reply["content"] == ""
    [choice] = completion(len(prompt), output, reply, None)["choices"]
    assert (choice["message"], choice["finish_reason"]) == (reply, "tool_calls")
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "2+3"}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    inputs = template_inputs([user("2+3"), {**reply, "refusal": None}, result], TOOLS)
    assert conversation.mismatch(inputs) is None
    assert conversation.prompt_for(inputs) == ids(
        f"<|user|>2+3<|end|><|assistant|>{CALL}2+3{CALLED}<|end|><|tool|>5<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    "text", ["<tool_call>{no json}</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>", "5"]
)
def test_unparsable_call_remains_text(text: str) -> None:
    assert parse_reply(TOKENIZER, text) == {"role": "assistant", "content": text}


def test_several_calls_are_extracted_from_the_surrounding_text() -> None:
    message = parse_reply(TOKENIZER, f"ten {CALL}1{CALLED} and\n{CALL}2{CALLED}")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        '{"expression": "1"}',
        '{"expression": "2"}',
    ]
    assert message["content"] == "ten  and"
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_tokenizer_response_template_is_used() -> None:
    """The template's markers around tool calls differ from the default markers."""
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
    conversation = Conversation(tokenizer, 1000)
    conversation.prompt_for(template_inputs([user("2+3")], TOOLS))
    reply = conversation.add_reply(sampled("socall2+3end"), tools=True)
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
def test_messages_that_do_not_continue_the_conversation_are_reported_as_a_mismatch(
    messages: list[dict[str, Any]],
) -> None:
    conversation = Conversation(TOKENIZER, 1000)
    started(conversation, "2+3", "5")
    assert conversation.mismatch(template_inputs(messages))


def test_request_that_exceeds_the_context_is_rejected_and_earlier_replies_are_kept() -> None:
    conversation = Conversation(TOKENIZER, 12)
    reply = started(conversation, "2+3", "5")
    with pytest.raises(ContextFull, match=r"--data\.max_len 12"):
        conversation.prompt_for(template_inputs([user("2+3"), reply, user("4")]))
    assert conversation.ranges == [(6, 8)]


@pytest.mark.parametrize("messages", [None, [], [{"role": "user"}], [{"content": "x"}], 5])
def test_malformed_messages_are_rejected(messages: Any) -> None:
    with pytest.raises(ChatMistake) as refused:
        template_inputs(messages)
    assert refused.value.param == "messages"
