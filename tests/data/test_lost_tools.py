"""Tools that a chat template omits are reported for every kind of row.

Tool calls that the template omits do not count as answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.supervised import KTODataConfig, PreferenceDataConfig, SFTDataConfig
from openrlhf.data.errors import DataError
from openrlhf.data.feedback import LabelledDataset, PreferenceDataset
from openrlhf.data.prompts import AnsweredDataset, PromptDataset
from openrlhf.data.rows import TokenizedRows
from openrlhf.data.sft import SFTDataset
from tests.data.small import MARKED_CHAT, PLAIN_CHAT, build_tokenizer

DEFINITIONS = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
CALLS = "{% for call in message.tool_calls %}({{ call.name }}){% endfor %}"
KNOWS_CALLS = PLAIN_CHAT.replace("{{ message.content }}", "{{ message.content }}" + CALLS)
KNOWS_TOOLS = DEFINITIONS + KNOWS_CALLS
TEMPLATES = {
    "neither": PLAIN_CHAT,
    "definitions only": DEFINITIONS + PLAIN_CHAT,
    "calls only": KNOWS_CALLS,
    "both": KNOWS_TOOLS,
}

CHAT: dict[str, Any] = {"apply_chat_template": True, "max_len": 200}
TOOLS = [{"name": "add"}]
# The user's text contains the tool's name by chance.
ASKED = {"role": "user", "content": "please add 1 and 2"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"name": "add", "arguments": {"x": 1}}],
}
HEARD = {"role": "tool", "content": "3"}
ANSWERED = {"role": "assistant", "content": "three"}
OTHER = {"role": "assistant", "content": "four"}
WHOLE = [ASKED, CALLED, HEARD, ANSWERED]
EMPTY = {"role": "assistant", "content": ""}

Read = Callable[[Dataset, Any], TokenizedRows[Any]]
KINDS: dict[str, tuple[dict[str, Any], Read]] = {
    "sft": ({"input": WHOLE}, lambda rows, t: SFTDataset(rows, t, SFTDataConfig(**CHAT))),
    "sft, turns": (
        {"input": WHOLE},
        lambda rows, t: SFTDataset(rows, t, SFTDataConfig(multiturn=True, **CHAT)),
    ),
    "pairs": (
        {"chosen": WHOLE, "rejected": [*WHOLE[:3], OTHER]},
        lambda rows, t: PreferenceDataset(rows, t, PreferenceDataConfig(**CHAT)),
    ),
    "labelled": (
        {"input": WHOLE[:3], "output": "three", "label": 1},
        lambda rows, t: LabelledDataset(
            rows, t, KTODataConfig(output_key="output", label_key="label", **CHAT)
        ),
    ),
    "prompts": ({"input": WHOLE[:3]}, lambda rows, t: PromptDataset(rows, t, RLDataConfig(**CHAT))),
    "answers to score": (
        {"input": WHOLE},
        lambda rows, t: AnsweredDataset(rows, t, InferenceDataConfig(output_key=None, **CHAT)),
    ),
}


def notices(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "tool calls" in line]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_tools_omitted_by_the_template_are_reported_once_with_the_first_row(
    kind: str, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row, read = KINDS[kind]
    without = {name: value for name, value in row.items() if name == "label"}
    for name, value in row.items():
        if isinstance(value, list):
            without[name] = [
                message for message in value if "tool_calls" not in message and message != HEARD
            ]
        elif name == "output":
            without[name] = value
    tokenizer = build_tokenizer(TEMPLATES[template])
    read(Dataset.from_list([without]), tokenizer)
    assert not notices(capsys)
    calling = row | {"tools": TOOLS}
    read(
        Dataset.from_list([without | {"tools": None}, without | {"tools": []}, calling, calling]),
        tokenizer,
    )
    found = notices(capsys)
    if template == "both":
        assert not found
    else:
        assert (
            len(found) == 1 and "2 of 4" in found[0] and "row 3" in found[0] and "'add'" in found[0]
        )


def learned(template: str, messages: list[dict[str, Any]], **flags: Any) -> list[str]:
    """Return a row's target text, split after each end-of-turn token."""
    tokenizer = build_tokenizer(template, eos="<|end|>")
    rows = SFTDataset(
        Dataset.from_list([{"input": messages, "tools": TOOLS}]),
        tokenizer,
        SFTDataConfig(**CHAT, **flags),
    )
    return shown(rows, tokenizer).replace("\n", "").split("<|end|>")[:-1]


def shown(rows: SFTDataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the target text of the first row."""
    kept = [
        token for token, wanted in zip(rows[0].tokens, rows[0].loss_mask, strict=True) if wanted
    ]
    return "".join(tokenizer.convert_ids_to_tokens(kept))


def test_turn_is_a_target_only_if_the_template_renders_its_tool_calls() -> None:
    for template in (PLAIN_CHAT, DEFINITIONS + PLAIN_CHAT, MARKED_CHAT):
        assert learned(template, WHOLE, multiturn=True) == ["three"]
        assert learned(template, [*WHOLE, ASKED, CALLED], multiturn=True) == ["three"]
    assert learned(KNOWS_TOOLS, WHOLE, multiturn=True) == ["(add)", "three"]
    assert learned(KNOWS_TOOLS, WHOLE[:2]) == ["(add)"]


def test_intentionally_empty_turn_is_a_target() -> None:
    for template in (PLAIN_CHAT, KNOWS_TOOLS):
        assert learned(template, [ASKED, EMPTY, ASKED, ANSWERED], multiturn=True) == ["", "three"]


@pytest.mark.parametrize("content", [None, "", "\n"])
@pytest.mark.parametrize("multiturn", [False, True])
def test_row_is_dropped_and_reported_if_the_template_omits_its_only_answer(
    content: str | None, multiturn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    called = [ASKED, CALLED | {"content": content}]
    data = SFTDataConfig(multiturn=multiturn, **CHAT)
    rows = SFTDataset(
        Dataset.from_list([{"input": called}, {"input": [ASKED, ANSWERED]}]),
        build_tokenizer(PLAIN_CHAT),
        data,
    )
    assert len(rows) == 1 and "1 of 2" in rows.summary
    [found] = notices(capsys)
    assert "1 of 2" in found and "row 1" in found
    with pytest.raises(DataError):
        SFTDataset(Dataset.from_list([{"input": called}]), build_tokenizer(PLAIN_CHAT), data)
    assert (
        len(SFTDataset(Dataset.from_list([{"input": called}]), build_tokenizer(KNOWS_TOOLS), data))
        == 1
    )


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_pair_is_dropped_if_an_answer_consists_only_of_omitted_tool_calls(
    side: str,
) -> None:
    pair = {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, ANSWERED], side: [ASKED, CALLED]}
    good = {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, OTHER]}
    for needs_prompt in (False, True):
        for template, kept in ((PLAIN_CHAT, 1), (KNOWS_TOOLS, 2)):
            rows = PreferenceDataset(
                Dataset.from_list([pair, good]),
                build_tokenizer(template),
                PreferenceDataConfig(**CHAT),
                needs_prompt=needs_prompt,
            )
            assert len(rows) == kept


def test_omitted_tool_calls_are_not_trained_on_in_responses_of_several_messages() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = {"input": [ASKED], "output": WHOLE[1:]}
    rows = SFTDataset(
        Dataset.from_list([row]), tokenizer, SFTDataConfig(output_key="output", **CHAT)
    )
    assert shown(rows, tokenizer) == "three<|end|>"
