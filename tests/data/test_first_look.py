"""Problems detected in a run's first rows.

Examples are tokenizers that lose text, templates that differ from training, and wrong answer
endings.
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
    """Return a word-level tokenizer.

    By default the tokenizer drops whitespace and joins words with a space when decoding.
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
        (words("two", "words"), "two   words\n"),  # each run of whitespace becomes one space
        (
            words("do", "n't", ".", splits=pre_tokenizers.Split("n't", "isolated")),
            "don't",
        ),  # decoding inserts a space
        # The decoded text has a different Unicode form.
        (words("fi", normalizer=normalizers.NFKC()), "ﬁ"),
        (words("a", "b"), "a<eos>b"),
    ],
)
def test_changed_whitespace_and_unicode_forms_do_not_count_as_lost_text(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    assert round_trip(tokenizer, [text]) == []


@pytest.mark.parametrize(
    ("tokenizer", "text", "back"),
    [
        (words("two", "words", decoder=decoders.Fuse()), "two words", "twowords"),  # spaces vanish
        (words("two", normalizer=normalizers.Replace("!", "")), "two!", "two"),  # "!" vanishes
        (words("a"), "a lot of unknown words", "a <unk>"),
    ],
)
def test_error_for_lost_text_shows_the_text_before_and_after_decoding(
    tokenizer: PreTrainedTokenizerBase, text: str, back: str
) -> None:
    with pytest.raises(DataError) as caught:
        round_trip(tokenizer, ["two" if "two" in text else "a", text])
    assert (
        repr(text) in str(caught.value)
        and back in str(caught.value)
        and "Text is lost" in str(caught.value)
    )


def test_prompts_decoded_with_different_whitespace_produce_a_notice() -> None:
    """Queries are decoded from tokens, so `query[len(prompt):]` would cut off response text."""
    said = str(*round_trip(words("two", "words"), ["two   words\n"], prompts=True))
    assert r"'two   words\n' decodes to 'two words'" in said and "query[len(prompt):]" in said
    assert round_trip(words("two", "words"), ["two words"], prompts=True) == []


def test_a_few_unknown_tokens_or_lost_capitals_produce_a_notice() -> None:
    tokenizer = build_tokenizer()
    tokenizer.unk_token = "<unk>"
    said = str(*round_trip(tokenizer, ["some letters, and äöü"]))
    assert "3 of 21 tokens are unknown" in said
    said = str(*round_trip(words("two", normalizer=normalizers.Lowercase()), ["TWO"]))
    assert "'TWO' decodes to 'two'" in said and "cannot distinguish case" in said


def test_texts_are_collected_from_strings_and_message_content() -> None:
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2
    rows = Dataset.from_dict({"chat": chats, "text": ["c", None], "number": [1, 2]})
    assert texts_of(rows, ["chat", "text", "number", "missing"]) == ["a", "b", "a", "b", "c"]
    assert len(texts_of(Dataset.from_dict({"text": ["x"] * 100}), ["text"])) == 8


# ---- text formats

QUESTION = SimpleNamespace(apply_chat_template=False, input_template="Q: {}\nA: ")
NOTHING = SimpleNamespace(apply_chat_template=False, input_template=None)
BARE = SimpleNamespace(apply_chat_template=False, input_template="{}")
CHAT = SimpleNamespace(apply_chat_template=True, input_template="ignored {}")


def of(flags: SimpleNamespace, template: str | None = None) -> TextFormat:
    return TextFormat.of(flags, build_tokenizer(template))


def test_recorded_format_is_saved_and_loaded_with_the_tokenizer(tmp_path: Any) -> None:
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
        (of(CHAT, PLAIN_CHAT), of(CHAT, MARKED_CHAT), "was trained with a different chat template"),
    ],
)
def test_prompt_format_that_differs_from_training_produces_a_notice(
    trained: TextFormat, used: TextFormat, said: str
) -> None:
    prompts = ["2+2" if trained.input_template else "Q"]
    sentence = str(*compare_formats("--actor.model_name_or_path m", trained, used, prompts))
    assert sentence.startswith("--actor.model_name_or_path m was") and said in sentence


def test_matching_prompt_format_or_rows_that_contain_the_template_produce_no_notice() -> None:
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
def test_common_ending_of_answers_is_detected(
    texts: list[str], ending: str, said: str | None
) -> None:
    tokenizer = build_tokenizer()
    found = ending_of([encoded.tokens for encoded in encode(tokenizer, texts)], tokenizer)
    notices = check_ending(found, tokenizer, "Responses")
    assert found == ending
    assert said in str(*notices) if said else notices == []


def test_chat_template_whose_end_token_does_not_stop_generation_produces_a_notice() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT)
    said = str(*chat_end(tokenizer, {"<eos>"}))
    assert "'<|end|>\\n', but generation stops at <eos>. Add --rollout.stop $'<|end|>'." in said
    assert chat_end(tokenizer, {"<eos>", "<|end|>"}) == []


@pytest.mark.parametrize(
    ("end", "advice"), [("{{ '\n' }}", r"--rollout.stop $'\n'"), ("", "Add an end-of-turn text")]
)
def test_notice_about_a_template_without_an_end_token_never_suggests_an_empty_stop(
    end: str, advice: str
) -> None:
    template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
    assert advice in str(*chat_end(build_tokenizer(template), {"<eos>"}))


def test_rows_that_begin_with_the_template_text_are_reported() -> None:
    """`batch_inference` writes complete prompts, so a default template would be applied twice."""
    used = TextFormat(input_template="User: {}\nAssistant: ")
    sentence = str(*filled_already(used, ["User: 1+1=\nAssistant: ", "2"]))
    assert "'User:'" in sentence and "--data.input_template {}" in sentence
    assert filled_already(used, ["1+1=", "2"]) == []
    for template in (None, "{}", "{} is"):
        assert filled_already(TextFormat(input_template=template), ["User: 1+1="]) == []


def test_template_whose_trailing_space_merges_with_the_answer_is_reported() -> None:
    tokenizer = spaced_tokenizer()
    sentence = str(*joined_border(TextFormat(input_template="User: {}\nAssistant: "), tokenizer))
    assert sentence.endswith(" --data.input_template $'User: {}\\nAssistant:'")
    for template in ("User: {}\nAssistant:", "User: {}\nAssistant", "{}", None):
        assert joined_border(TextFormat(input_template=template), tokenizer) == []
    assert (
        joined_border(TextFormat(input_template="User: {}\nAssistant: "), build_tokenizer()) == []
    )


def test_chat_template_that_neither_flags_nor_texts_use_is_reported() -> None:
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
def test_prompts_and_answers_without_a_separator_are_reported(
    prompt: str, answer: str, pointed_out: bool
) -> None:
    assert bool(glued([prompt], [answer])) == pointed_out
