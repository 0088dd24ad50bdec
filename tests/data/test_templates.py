"""Templates keep texts unchanged, and the tokens of each answer are located exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelOffsets
from tokenizers.trainers import BpeTrainer
from transformers import (
    ByT5Tokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data.messages import Message, learned_turns, to_messages
from openrlhf.data.sft import SFTDataset
from openrlhf.data.templates import encode, fill_template, render, render_conversation
from openrlhf.data.tokenizer import get_tokenizer
from tests.data.small import (
    FORGETFUL_CHAT,
    MARKED_CHAT,
    PLAIN_CHAT,
    SPACED_CHAT,
    THINKING_CHAT,
    build_tokenizer,
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


TWO_TURNS = [user("a"), assistant("ok"), user("c"), assistant("no")]


# ---- input templates


@pytest.mark.parametrize(
    ("template", "text", "filled"),
    [
        (None, "x", "x"),
        ("User: {}\nAssistant: ", "hi", "User: hi\nAssistant: "),
        ("Q: {}", "a set {1, 2} and {}", "Q: a set {1, 2} and {}"),
        ('{"question": "{}"}', "x", '{"question": "x"}'),
        ('{{"question": "{}"}}', "x", '{"question": "x"}'),
    ],
)
def test_input_template_accepts_arbitrary_text_and_braces(
    template: str | None, text: str, filled: str
) -> None:
    assert fill_template(template, text) == filled


# ---- messages


def test_string_becomes_a_single_message() -> None:
    assert to_messages("hi") == [user("hi")]
    assert to_messages("hi", role="assistant") == [assistant("hi")]


def test_null_message_fields_are_removed() -> None:
    assert to_messages([{"role": "user", "content": "a", "tool_calls": None}]) == [user("a")]


def test_text_parts_of_message_content_are_joined() -> None:
    parts = [
        {"type": "text", "text": "2+", "image": None},
        {"type": "text", "text": "3"},
    ]  # the null value is added by Arrow
    assert to_messages([{"role": "user", "content": parts}]) == [user("2+3")]


def test_message_with_a_tool_call_may_lack_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert to_messages([call])[0]["content"] == ""


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "is null, not a string or a list"),
        (3, "is a number"),
        ([], "is an empty list"),
        (["hi"], "message 0 is a string, not an object"),
        ([user("a"), {"from": "gpt"}], "message 1 needs 'role' and 'content', but has 'from'"),
        (
            [user("a"), {"from": "bard", "value": "x"}],
            "the role of message 1 is 'bard', not one of system, developer, user",
        ),
        (
            [user("a") | {"tool_calls": ["f"]}],
            r"the tool_calls of message 0 must be a list of objects, not \['f'\]",
        ),
        (
            [{"from": "function_call", "value": "[1]"}],
            "the tool_calls of message 0 must be a list of objects",
        ),
        (
            [{"from": "function_call", "value": "f(x)"}],
            "the function_call of message 0 .*JSON: 'f.x.'",
        ),
        (
            [{"role": "user", "content": 3}],
            "the content of message 0 must be a string or a list of texts, not a number",
        ),
        ([{"role": "user", "content": None}], "needs 'role' and 'content'"),
        ([{"role": 1, "content": "a"}], "the role of message 0 is 1, not one of system"),
        (
            [{"role": "user", "content": ["a"]}],
            "the content of message 0 must be a string or a list of texts, not a list",
        ),
        (
            [
                user("a"),
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "b"}, {"type": "image", "image": "b.png"}],
                },
            ],
            "the content of message 1 has parts of type 'image'; the policy reads text only",
        ),
    ],
)
def test_error_for_a_malformed_message_gives_its_index_and_the_problem(
    value: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        to_messages(value)


def test_template_error_message_is_included_in_the_error() -> None:
    tokenizer = build_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="cannot render these messages: roles must alternate"):
        render(tokenizer, [user("a")], add_generation_prompt=True)


def test_render_matches_the_tokenizers_own_rendering() -> None:
    tokenizer = build_tokenizer(MARKED_CHAT)
    for prompt in (True, False):
        expected = tokenizer.apply_chat_template(
            TWO_TURNS, tokenize=False, add_generation_prompt=prompt
        )
        assert render(tokenizer, TWO_TURNS, add_generation_prompt=prompt) == expected


# ---- locating the assistant's text


def targets(template: str, messages: list[dict[str, Any]], *, every_turn: bool) -> list[str]:
    turns = learned_turns(messages, chosen=True) if every_turn else ()
    passage = render_conversation(build_tokenizer(template), messages, turns=turns)
    return [passage.text[start:end] for start, end in passage.spans]


def test_every_assistant_turn_is_found_in_a_template_without_marks() -> None:
    assert targets(PLAIN_CHAT, TWO_TURNS, every_turn=True) == ["ok<|end|>\n", "no<|end|>\n"]


def test_only_the_last_turn_is_a_target_by_default() -> None:
    assert targets(PLAIN_CHAT, TWO_TURNS, every_turn=False) == ["no<|end|>\n"]
    assert targets(MARKED_CHAT, TWO_TURNS, every_turn=False) == ["no<|end|>"]


def test_spans_from_template_marks_equal_spans_from_prefixes_except_for_the_last_newline() -> None:
    unmarked = targets(PLAIN_CHAT, TWO_TURNS, every_turn=True)
    assert targets(MARKED_CHAT, TWO_TURNS, every_turn=True) == [
        turn.removesuffix("\n") for turn in unmarked
    ]


def test_earlier_turn_whose_reasoning_was_dropped_is_not_a_target() -> None:
    messages = [
        user("a"),
        assistant("<think>hm</think>ok"),
        user("c"),
        assistant("<think>so</think>no"),
    ]
    passage = render_conversation(
        build_tokenizer(FORGETFUL_CHAT), messages, turns=learned_turns(messages, chosen=True)
    )
    assert "hm" not in passage.text
    assert [passage.text[start:end] for start, end in passage.spans] == [
        "<think>so</think>no<|end|>\n"
    ]
    assert passage.rewritten == 1


def test_turns_without_reasoning_are_targets_if_the_template_drops_reasoning() -> None:
    assert targets(FORGETFUL_CHAT, TWO_TURNS, every_turn=True) == ["ok<|end|>\n", "no<|end|>\n"]


def test_turns_are_found_if_the_template_adds_a_thought_only_to_the_last_turn() -> None:
    assert targets(THINKING_CHAT, TWO_TURNS, every_turn=True) == [
        "ok<|end|>\n",
        "</think>no<|end|>\n",
    ]


def test_answer_is_found_if_the_generation_prompt_adds_a_thought() -> None:
    prompts_a_thought = PLAIN_CHAT.replace("<|assistant|>", "<|assistant|><think>")
    assert targets(prompts_a_thought, TWO_TURNS, every_turn=True) == ["ok<|end|>\n", "no<|end|>\n"]


def test_answer_whose_separate_reasoning_field_is_dropped_is_not_a_target() -> None:
    prompts_a_thought = PLAIN_CHAT.replace("<|assistant|>", "<|assistant|><think>")
    messages = [user("a"), assistant("ok", reasoning_content="hm"), user("c"), assistant("no")]
    passage = render_conversation(
        build_tokenizer(prompts_a_thought), messages, turns=learned_turns(messages, chosen=True)
    )
    assert (len(passage.spans), passage.rewritten) == (1, 1)


def test_conversation_may_begin_with_an_assistant_turn() -> None:
    assert targets(PLAIN_CHAT, [assistant("hi"), user("a"), assistant("ok")], every_turn=True) == [
        "hi<|end|>\n",
        "ok<|end|>\n",
    ]


def test_template_that_changes_the_last_answer_raises_an_error_with_a_suggested_fix() -> None:
    drops_all = FORGETFUL_CHAT.replace("loop.last", "false")
    drops_all = drops_all.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
    with pytest.raises(ValueError, match=r"\{% generation %\}.*--data\.tokenizer_chat_template"):
        targets(drops_all, [user("a"), assistant("<think>hm</think>ok")], every_turn=False)


def test_response_starts_at_the_last_turn() -> None:
    passage = render_conversation(build_tokenizer(PLAIN_CHAT), TWO_TURNS, turns=(1, 3))
    assert passage.text[passage.response :] == "no<|end|>\n"


# ---- from characters to tokens


def words_of(tokenizer: Any, text: str, span: tuple[int, int]) -> list[str]:
    encoded = encode(tokenizer, [text])[0]
    return [
        tokenizer.convert_ids_to_tokens(encoded.tokens)[place] for place in encoded.tokens_of(span)
    ]


def test_token_that_straddles_the_start_of_the_response_belongs_to_the_response() -> None:
    assert words_of(build_tokenizer(), "A: bee", (3, 6)) == [" b", "e", "e"]


def test_token_that_straddles_the_end_of_the_response_belongs_to_the_response() -> None:
    assert words_of(build_tokenizer(), "ok\nB: x", (0, 3)) == ["ok", "\nB"]


def test_tokenizer_without_offsets_encodes_the_text_before_the_boundary() -> None:
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    assert words_of(tokenizer, "A: bee", (3, 6)) == ["b", "e", "e"]


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer like GPT-2's.

    The token of a word includes the leading space, but the token's offsets do not.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=300, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    backend.train_from_iterator(["the answer is yes", "the answer is no", "  is it"] * 3, trainer)
    backend.post_processor = ByteLevelOffsets(trim_offsets=True, add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_spaces_missing_from_the_offsets_do_not_shift_boundaries(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    prompt, response = "the answer is ", "yes"
    end = len(prompt) + len(response)
    assert words_of(byte_level, prompt + response, (len(prompt), end))[0].startswith("Ġ")
    assert (
        "Ġ" not in words_of(byte_level, "is:  yes", (5, 8))[:1]
    )  # a token with only spaces belongs to the prompt


@given(text=st.text(alphabet="abe \n:é漢🙂", min_size=2, max_size=20), data=st.data())
def test_tokens_of_a_span_are_those_that_overlap_its_bytes(
    byte_level: PreTrainedTokenizerFast, text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    encoded = encode(byte_level, [text])[0]
    first, last = len(text[:start].encode()), len(text[:end].encode())
    expected, position = [], 0
    for place, token in enumerate(byte_level.convert_ids_to_tokens(encoded.tokens)):
        if (
            position < last and position + len(token) > first
        ):  # each character of a byte-level token represents one byte
            expected.append(place)
        position += len(token)
    assert list(encoded.tokens_of((start, end))) == expected


def test_first_answer_token_is_a_target_if_the_prompt_ends_in_a_space() -> None:
    tokenizer = build_tokenizer(SPACED_CHAT)
    passage = render_conversation(tokenizer, [user("a"), assistant("bee")])
    encoded = encode(tokenizer, [passage.text])[0]
    learned = [
        tokenizer.convert_ids_to_tokens(encoded.tokens)[t]
        for t in encoded.tokens_of(passage.spans[0])
    ]
    assert learned == [" b", "e", "e", "\n"]


# ---- end-of-turn tokens, and conversation prefixes that a template rejects

ROLE_MARKED_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user query') }}{% endif %}"
)


def tokenizer_that_stops_at(folder: Path, template: str, *ends: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose model stops generation at <eos> and at `ends`."""
    tokenizer = build_tokenizer(template)
    tokenizer.save_pretrained(folder)
    numbers = [tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", *ends)]
    GenerationConfig(eos_token_id=numbers).save_pretrained(folder)
    return get_tokenizer(str(folder))


def learned(rows: SFTDataset, number: int = 0) -> tuple[str, str]:
    """Return a row's full text, and the text of the row's target tokens."""
    row, names = rows[number], rows.tokenizer.convert_ids_to_tokens(rows[number].tokens)
    return "".join(names), "".join(
        name for name, target in zip(names, row.loss_mask, strict=True) if target
    )


def chats(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **flags: Any) -> SFTDataset:
    data = SFTDataConfig(input_key="messages", apply_chat_template=True, max_len=99, **flags)
    return SFTDataset(Dataset.from_list([{"messages": messages}]), tokenizer, data)


SAID = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_nothing_is_appended_to_a_chat_that_ends_with_a_stop_token(tmp_path: Path) -> None:
    assert (
        learned(chats(tokenizer_that_stops_at(tmp_path / "1", PLAIN_CHAT, "<|end|>"), SAID))[1]
        == "d<|end|>"
    )
    assert (
        learned(chats(tokenizer_that_stops_at(tmp_path / "2", PLAIN_CHAT), SAID))[1]
        == "d<|end|><eos>"
    )


@pytest.mark.parametrize("stops", [True, False])
def test_role_marker_that_ends_a_turn_is_a_target_only_if_it_stops_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stops: bool
) -> None:
    tokenizer = tokenizer_that_stops_at(tmp_path, ROLE_MARKED_CHAT, *["<|user|>"] * stops)
    text, targets = learned(chats(tokenizer, SAID, multiturn=True))
    assert text == "<|user|>a<|assistant|>b<|user|>c<|assistant|>d <eos>"
    assert targets == ("b<|user|>d <eos>" if stops else "bd <eos>")
    assert ("1 trained turns" in capsys.readouterr().err) == (not stops)


@pytest.mark.parametrize("template", [PLAIN_CHAT, MARKED_CHAT, ROLE_MARKED_CHAT])
@pytest.mark.parametrize("multiturn", [True, False])
def test_conversation_that_begins_with_an_assistant_turn_is_read_even_if_its_prefix_is_rejected(
    template: str, multiturn: bool
) -> None:
    messages = [{"role": "assistant", "content": "x"}, *SAID]
    free = learned(chats(build_tokenizer(template), messages, multiturn=multiturn))
    assert (
        learned(chats(build_tokenizer(NEEDS_USER + template), messages, multiturn=multiturn))
        == free
    )
