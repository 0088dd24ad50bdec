"""Chat: conversation text, dropped turns, sampling settings, and user commands."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from openrlhf.config.flags import ConfigError
from openrlhf.config.inference import ChatConfig
from openrlhf.config.options import parse_config
from openrlhf.data.first_look import TextFormat, record
from openrlhf.evaluation import chat as chat_module
from openrlhf.evaluation.chat import PLAIN, Chat, decide_sampling, run_chat, template_of
from tests.config.commands import parse
from tests.data.small import spaced_tokenizer
from tests.tiny import character_tokenizer, save_tiny_model

CHATML = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '/' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Parrot:
    """A model that always answers with the same tokens, streamed one at a time.

    `interrupts` is the number of tokens after which the user presses Ctrl-C.
    """

    device = "cpu"

    def __init__(self, answer: str, *, interrupts: int | None = None) -> None:
        self.tokens = character_tokenizer()(answer)["input_ids"]
        self.interrupts = interrupts
        self.generation_config = GenerationConfig()
        self.asked: list[str] = []
        self.budgets: list[int] = []

    def generate(self, tokens: Tensor, *, max_new_tokens: int, streamer: Any, **_: Any) -> None:
        self.asked.append(str(character_tokenizer().decode(tokens[0])))
        self.budgets.append(max_new_tokens)
        streamer.put(tokens)
        for number, token in enumerate(self.tokens):
            if number == self.interrupts:
                raise KeyboardInterrupt
            streamer.put(torch.tensor([token]))
        streamer.end()


def chat(line: str, template: str | None = "q{}a", chat_template: str | None = None) -> Chat:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = chat_template
    return Chat(config=parse("interactive_chat", line), tokenizer=tokenizer, template=template)


def test_trailing_space_of_the_template_is_removed_if_the_tokenizer_merges_it_with_answers() -> (
    None
):
    """In training, the space before an answer is never a token of its own."""
    template = "User: {}\nAssistant: "
    for tokenizer, used in ((spaced_tokenizer(), template[:-1]), (character_tokenizer(), template)):
        talk = Chat(config=parse("interactive_chat", ""), tokenizer=tokenizer, template=template)
        assert talk.text("hi") == used.replace("{}", "hi")


def test_prompt_contains_the_system_text_the_preamble_and_all_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("pre\n")
    talk = chat(f"--system sys --preamble {tmp_path}/p.txt --csft.enable --csft.prompt 5")
    parrot = Parrot("ok<eos>")
    talk.answer("x", parrot)
    talk.answer("y", parrot)
    assert parrot.asked == ["sys\npre\nqxa 5 ", "sys\npre\nqxaok\nqya 5 "]
    assert capsys.readouterr().out == "ok\nok\n"


def test_empty_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    chat("").answer("x", Parrot("<eos>"))
    printed = capsys.readouterr().out
    assert "empty" in printed and printed.count("\n") == 1


def test_binary_preamble_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "p.bin").write_bytes(b"\x8a")
    with pytest.raises(ConfigError, match=f"--preamble {tmp_path}/p.bin"):
        chat(f"--preamble {tmp_path}/p.bin")


def test_chat_template_renders_the_system_text_and_the_turns_as_messages() -> None:
    talk = chat("--system sys", template=None, chat_template=CHATML)
    talk.turns += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert talk.text("c") == "system:sys/user:a/assistant:b/user:c/assistant:"


def test_oldest_turns_are_dropped_with_a_notice_until_the_answer_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The limit is 20 tokens, 10 of which are reserved for the answer.

    A turn has 6 tokens, so only one earlier turn fits in addition to the next message.
    """
    talk = chat("--data.max_len 20 --rollout.max_new_tokens 10")
    parrot = Parrot("bb<eos>")
    for message in ("1", "2", "3"):
        talk.answer(message, parrot)
    assert parrot.asked == ["q1a", "q1abb\nq2a", "q2abb\nq3a"]
    assert parrot.budgets == [10, 10, 10]
    printed = capsys.readouterr().err
    assert "[notice]" in printed and "--data.max_len" in printed
    talk.answer("123456789012", parrot)
    assert parrot.asked[-1] == "456789012a"


def test_ctrl_c_stops_the_answer_and_keeps_the_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = chat("")
    talk.answer("x", Parrot("abc", interrupts=2))
    assert capsys.readouterr().out == "ab [stopped]\n"
    assert [turn["content"] for turn in talk.turns] == ["x", "ab"]


@pytest.mark.parametrize(
    "stored",
    [
        {"num_beams": 4},
        {"do_sample": True, "num_return_sequences": 3},
        {"suppress_tokens": [3, 10]},
        {"min_new_tokens": 12},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "min_p": 0.9},
    ],
)
def test_answers_depend_on_the_flags_but_not_on_the_generation_config(
    tmp_path: Path,
    stored: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = []
    for name, values in (("plain", {}), ("stored", stored)):
        save_tiny_model(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(
            json.dumps({"eos_token_id": 1, **values})
        )
        monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
        torch.manual_seed(0)
        line = (
            f"--model.model_name_or_path {tmp_path / name} --data.input_template {{}} "
            "--rollout.max_new_tokens 24"
        )
        run_chat(parse("interactive_chat", f"{line} --data.max_len 60 --ds.param_dtype fp32"))
        answers.append(capsys.readouterr().out.splitlines()[-1])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("flag", "stored", "expected"), [("", 1.3, 1.3), ("", None, 1.0), ("1.1", 1.3, 1.1)]
)
def test_repetition_penalty_flag_takes_precedence_over_the_generation_config(
    flag: str, stored: float | None, expected: float
) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(repetition_penalty=stored))
    config = parse("interactive_chat", f"--rollout.repetition_penalty {flag}" if flag else "")
    assert decide_sampling(config, model).rollout.repetition_penalty == expected


def test_template_flags_take_precedence_over_training_format_and_tokenizer() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    assert template_of(parse("interactive_chat", ""), tokenizer) == PLAIN
    tokenizer.chat_template = CHATML
    assert template_of(parse("interactive_chat", ""), tokenizer) is None
    record(tokenizer, TextFormat(input_template="Q {} A"))
    assert template_of(parse("interactive_chat", ""), tokenizer) == "Q {} A"
    assert template_of(parse("interactive_chat", "--data.apply_chat_template"), tokenizer) is None
    assert template_of(parse("interactive_chat", "--data.input_template {}"), tokenizer) == "{}"
    record(tokenizer, TextFormat())
    assert template_of(parse("interactive_chat", ""), tokenizer) == "{}", (
        "trained without a template"
    )
    record(tokenizer, TextFormat(chat_template="1234"))
    assert template_of(parse("interactive_chat", ""), tokenizer) is None


class Loaded:
    """A loaded model."""

    def __init__(self, model: Parrot) -> None:
        self.model = model

    def eval(self) -> Parrot:
        return self.model


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, typed: str, line: str) -> Parrot:
    """Type the given lines into a chat with a parrot model, and return the model."""
    save_tiny_model(folder / "model")
    parrot = Parrot("ok<eos>")
    monkeypatch.setattr(chat_module, "load_causal_lm", lambda spec: Loaded(parrot))
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    words = (
        f"--model.model_name_or_path {folder}/model --data.input_template q{{}}a --max_len 64 "
        f"{line}"
    )
    run_chat(parse_config(ChatConfig, words.split(), command="interactive_chat"))
    return parrot


@pytest.mark.parametrize("reset", ["/reset", "clear"])
def test_reset_removes_the_turns_and_keeps_the_system_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reset: str
) -> None:
    parrot = run_with(monkeypatch, tmp_path, f"a\nb\n{reset}\nc\n/exit\nd\n", "--system sys")
    assert parrot.asked == ["sys\nqaa", "sys\nqaaok\nqba", "sys\nqca"]


def test_chat_dry_run_prints_the_tokens_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = run_with(
        monkeypatch, tmp_path, "a\n", "--dry_run --rollout.max_new_tokens 61 --system hello"
    )
    ids = " ".join(map(str, character_tokenizer()("loa")["input_ids"]))
    assert parrot.asked == []
    assert capsys.readouterr().out.endswith(f"--- the prompt 'Hello': 3 tokens, ids {ids}\nloa\n")
