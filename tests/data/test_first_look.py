"""Problems that the first rows of a run reveal.

These are tokenizers that lose text, templates that differ from training, and ends of answers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from openrlhf.data.errors import DataError
from openrlhf.data.first_look import (
    TextFormat,
    chat_end,
    check_ending,
    compare_formats,
    ending_of,
    filled_already,
    glued,
    joined_border,
    record,
    recorded,
    round_trip,
    texts_of,
    unused_chat_template,
)
from openrlhf.data.templates import encode
from tests.data.small import MARKED_CHAT, PLAIN_CHAT, build_tokenizer, spaced_tokenizer


def words(
    *vocabulary: str, normalizer: Any = None, splits: Any = None, decoder: Any = None
) -> PreTrainedTokenizerBase:
    """Return a tokenizer of whole words.

    By default it loses spaces, and joins words with a space when it decodes.
    """
    vocab = {word: number for number, word in enumerate(["<unk>", "<eos>", *vocabulary])}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = splits or pre_tokenizers.WhitespaceSplit()
    if normalizer:
        backend.normalizer = normalizer
    if decoder:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


# ---- round trips


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (build_tokenizer(), "Two  spaces,\n\na line break and CAPITALS."),
        (ByT5Tokenizer(), "Größe 数学 🙂\n"),
        (words("two", "words"), "two   words\n"),  # runs of white space become one space
        (
            words("do", "n't", ".", splits=pre_tokenizers.Split("n't", "isolated")),
            "don't",
        ),  # a space is added
        (words("fi", normalizer=normalizers.NFKC()), "ﬁ"),  # the same text in another Unicode form
        (words("a", "b"), "a<eos>b"),
    ],
)
def test_white_space_that_changes_and_unicode_forms_are_no_loss(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    assert round_trip(tokenizer, [text]) == []


@pytest.mark.parametrize(
    ("tokenizer", "text", "back"),
    [
        (words("two", "words", decoder=decoders.Fuse()), "two words", "twowords"),  # spaces vanish
        (words("two", normalizer=normalizers.Replace("!", "")), "two!", "two"),  # a sign vanishes
        (words("a"), "a lot of unknown words", "a <unk>"),
    ],
)
def test_lost_text_is_an_error_with_both_texts(
    tokenizer: PreTrainedTokenizerBase, text: str, back: str
) -> None:
    with pytest.raises(DataError) as caught:
        round_trip(tokenizer, ["two" if "two" in text else "a", text])
    assert (
        repr(text) in str(caught.value)
        and back in str(caught.value)
        and "Text is lost" in str(caught.value)
    )


def test_prompts_that_a_reward_gets_back_with_other_white_space_are_a_notice() -> None:
    """A query is decoded tokens, so query[len(prompt):] would cut into the response."""
    said = str(*round_trip(words("two", "words"), ["two   words\n"], prompts=True))
    assert r"'two   words\n' is decoded as 'two words'" in said and "query[len(prompt):]" in said
    assert round_trip(words("two", "words"), ["two words"], prompts=True) == []


def test_a_few_unknown_tokens_and_lost_capitals_are_a_notice() -> None:
    tokenizer = build_tokenizer()
    tokenizer.unk_token = "<unk>"
    said = str(*round_trip(tokenizer, ["some letters, and äöü"]))
    assert "3 of 21 tokens are unknown to it (<unk>)" in said
    said = str(*round_trip(words("two", normalizer=normalizers.Lowercase()), ["TWO"]))
    assert (
        "'TWO' comes back as 'two'" in said and "cannot distinguish upper from lower case" in said
    )


def test_the_texts_of_rows_are_strings_and_contents_of_messages() -> None:
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2
    rows = Dataset.from_dict({"chat": chats, "text": ["c", None], "number": [1, 2]})
    assert texts_of(rows, ["chat", "text", "number", "missing"]) == ["a", "b", "a", "b", "c"]
    assert len(texts_of(Dataset.from_dict({"text": ["x"] * 100}), ["text"])) == 8


# ---- the format of texts

QUESTION = SimpleNamespace(apply_chat_template=False, input_template="Q: {}\nA: ")
NOTHING = SimpleNamespace(apply_chat_template=False, input_template=None)
BARE = SimpleNamespace(apply_chat_template=False, input_template="{}")
CHAT = SimpleNamespace(apply_chat_template=True, input_template="ignored {}")


def of(flags: SimpleNamespace, template: str | None = None) -> TextFormat:
    return TextFormat.of(flags, build_tokenizer(template))


def test_a_format_goes_wherever_the_tokenizer_goes(tmp_path: Any) -> None:
    tokenizer = build_tokenizer()
    assert recorded(tokenizer) is None
    record(tokenizer, TextFormat(input_template="Q: {}", ending=" <eos>"))
    tokenizer.save_pretrained(tmp_path / "one")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert recorded(loaded) == TextFormat(input_template="Q: {}", ending=" <eos>")
    assert [e.tokens for e in encode(loaded, ["Q: ok"])] == [
        e.tokens for e in encode(tokenizer, ["Q: ok"])
    ]
    record(loaded, None)
    loaded.save_pretrained(tmp_path / "two")
    assert recorded(AutoTokenizer.from_pretrained(tmp_path / "two")) is None


@pytest.mark.parametrize(
    ("trained", "used", "said"),
    [
        (
            of(QUESTION),
            of(NOTHING),
            "was trained with --data.input_template $'Q: {}\\nA: ', but this run uses no template",
        ),
        (
            of(NOTHING),
            of(QUESTION),
            "was trained with no template, but this run uses --data.input_template",
        ),
        (
            of(CHAT, PLAIN_CHAT),
            of(NOTHING),
            "was trained with --data.apply_chat_template, but this run uses no template",
        ),
        (of(CHAT, PLAIN_CHAT), of(CHAT, MARKED_CHAT), "was trained with another chat template"),
    ],
)
def test_other_prompts_than_in_training_are_announced(
    trained: TextFormat, used: TextFormat, said: str
) -> None:
    prompts = ["2+2" if trained.input_template else "Q"]
    sentence = str(*compare_formats("--actor.model_name_or_path m", trained, used, prompts))
    assert sentence.startswith("--actor.model_name_or_path m was") and said in sentence


def test_the_same_prompts_are_not_and_neither_are_rows_that_bring_the_template_along() -> None:
    assert compare_formats("m", None, of(NOTHING), ["x"]) == []
    assert of(BARE) == of(NOTHING)
    for flags, template in ((QUESTION, None), (NOTHING, None), (CHAT, PLAIN_CHAT)):
        assert compare_formats("m", of(flags, template), of(flags, template), ["x"]) == []
    assert compare_formats("m", of(QUESTION), of(NOTHING), ["Q: 1+1\nA: ", "Q: 2\nA: "]) == []
    assert compare_formats("m", of(QUESTION), of(NOTHING), ["Q: 1+1\nA: ", "2"]) != []


# ---- ends


@pytest.mark.parametrize(
    ("texts", "ending", "said"),
    [
        (
            ["Q: no <eos>", "Q: yes <eos>", "Q: cu<eos>"],
            " <eos>",
            "end with an added space before <eos>",
        ),
        (["Q: no<eos>", "Q: yes<eos>"], "<eos>", None),
        (["Q: no", "Q: yes"], "", "will not learn to end"),
    ],
)
def test_what_answers_end_with(texts: list[str], ending: str, said: str | None) -> None:
    tokenizer = build_tokenizer()
    found = ending_of([encoded.tokens for encoded in encode(tokenizer, texts)], tokenizer)
    notices = check_ending(found, tokenizer, "Responses")
    assert found == ending
    assert said in str(*notices) if said else notices == []


def test_a_chat_template_that_ends_answers_with_what_does_not_end_generation_is_announced() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT)
    said = str(*chat_end(tokenizer, {"<eos>"}))
    assert "'<|end|>\\n', but generation ends at <eos>: add --rollout.stop '<|end|>'" in said
    assert chat_end(tokenizer, {"<eos>", "<|end|>"}) == []


def test_rows_that_begin_with_the_words_of_the_template_are_pointed_out() -> None:
    """batch_inference wrote the whole prompt, so the default template would be applied twice."""
    used = TextFormat(input_template="User: {}\nAssistant: ")
    sentence = str(*filled_already(used, ["User: 1+1=\nAssistant: ", "2"]))
    assert "'User:'" in sentence and "--data.input_template {}" in sentence
    assert filled_already(used, ["1+1=", "2"]) == []
    for template in (None, "{}", "{} is"):
        assert filled_already(TextFormat(input_template=template), ["User: 1+1="]) == []


def test_a_template_whose_last_space_the_tokenizer_joins_with_the_answer_is_pointed_out() -> None:
    tokenizer = spaced_tokenizer()
    sentence = str(*joined_border(TextFormat(input_template="User: {}\nAssistant: "), tokenizer))
    assert sentence.endswith(" --data.input_template $'User: {}\\nAssistant:'")
    for template in ("User: {}\nAssistant:", "User: {}\nAssistant", "{}", None):
        assert joined_border(TextFormat(input_template=template), tokenizer) == []
    assert (
        joined_border(TextFormat(input_template="User: {}\nAssistant: "), build_tokenizer()) == []
    )


def test_a_chat_template_that_neither_flags_nor_texts_use_is_pointed_out() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT)
    found = unused_chat_template("--model.model_name_or_path m", tokenizer, ["a"], applied=False)
    assert "--data.apply_chat_template" in str(*found)
    assert unused_chat_template("m", tokenizer, ["a"], applied=True) == []
    assert unused_chat_template("m", tokenizer, ["<|user|>a<|end|>"], applied=False) == []
    assert unused_chat_template("m", build_tokenizer(), ["a"], applied=False) == []
    record(tokenizer, TextFormat())
    assert unused_chat_template("m", tokenizer, ["a"], applied=False) == []


@pytest.mark.parametrize(
    ("prompt", "answer", "pointed_out"),
    [
        ("Hi there", "you", True),
        ("Is it?", "Yes", True),
        ("2+2=", "4", False),
        ("a ", "b", False),
        ("a", " b", False),
    ],
)
def test_prompts_and_answers_with_nothing_in_between_are_pointed_out(
    prompt: str, answer: str, pointed_out: bool
) -> None:
    assert bool(glued([prompt], [answer])) == pointed_out
