"""Tests that a tokenizer is either loaded completely or rejected with an explanation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.data.errors import DataError
from openrlhf.data.tokenizer import get_tokenizer, require_chat_template
from openrlhf.reporting import notice
from tests.data.small import PLAIN_CHAT, build_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> str:
    build_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def edit(folder: str, **changes: object) -> None:
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def test_missing_padding_token_defaults_to_the_eos_token(saved: str) -> None:
    edit(saved, pad_token=None)
    tokenizer = get_tokenizer(saved)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<eos>", 1)


def test_dedicated_padding_token_is_kept(saved: str) -> None:
    edit(saved, pad_token="<unk>")
    assert get_tokenizer(saved).pad_token == "<unk>"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_is_set_as_requested(saved: str, side: str) -> None:
    assert get_tokenizer(saved, padding_side=side).padding_side == side


def test_text_longer_than_the_tokenizer_limit_causes_no_transformers_warning(
    saved: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(saved, model_max_length=4)
    tokenizer = get_tokenizer(saved)
    with caplog.at_level("WARNING"):
        assert len(tokenizer("a" * 20).input_ids) > tokenizer.model_max_length == 4
    assert caplog.records == []


def test_chat_template_argument_replaces_the_tokenizers_template(saved: str) -> None:
    tokenizer = get_tokenizer(saved, chat_template="{{ messages[0].content }}!")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    )


def test_error_for_a_missing_folder_names_the_flag_and_the_path() -> None:
    with pytest.raises(
        DataError, match=r"--model\.model_name_or_path './nowhere' \(treated as a hub name"
    ):
        get_tokenizer("./nowhere")


def test_error_for_an_unreachable_hub_repository_names_the_flag() -> None:
    with pytest.raises(DataError, match=r"--actor\.model_name_or_path 'nobody/nothing'"):
        get_tokenizer("nobody/nothing", flag="--actor.model_name_or_path")


def test_model_without_tokenizer_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(DataError, match="has no tokenizer"):
        get_tokenizer(str(tmp_path))


def test_tokenizer_code_in_the_model_repository_requires_trust_remote_code(saved: str) -> None:
    (Path(saved) / "config.json").write_text(json.dumps({"model_type": "strange"}))
    edit(saved, tokenizer_class="Strange", auto_map={"AutoTokenizer": ["code.Strange", None]})
    with pytest.raises(DataError, match=r"--model\.trust_remote_code"):
        get_tokenizer(saved)


def test_tokenizer_without_an_eos_token_is_rejected(saved: str) -> None:
    edit(saved, eos_token=None, pad_token=None)
    with pytest.raises(DataError, match="no end-of-text token"):
        get_tokenizer(saved)


def test_chat_messages_require_a_chat_template() -> None:
    require_chat_template(build_tokenizer(PLAIN_CHAT))
    with pytest.raises(
        DataError, match=r"--data\.apply_chat_template.*--data\.tokenizer_chat_template"
    ):
        require_chat_template(build_tokenizer())


def test_notice_is_printed_only_by_rank_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        notice(f"from {rank}")
    assert capsys.readouterr().err == "[notice] from 0\n"
