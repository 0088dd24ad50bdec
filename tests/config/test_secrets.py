"""Passwords, tokens and keys given in flags work, but are masked in everything a run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from openrlhf.config.flags import ConfigError, Flag, amend, flags_of
from openrlhf.config.options import dump_yaml, parse_config
from openrlhf.masking import hide, is_hidden, without_secrets
from openrlhf.reporting import notice
from tests.config.commands import COMMANDS, ppo, violations

SECRET = "hunter2"
URLS = {
    f"http://me:{SECRET}@host:5000/get_reward": "http://***@host:5000/get_reward",
    f"http://{SECRET}@host/v1": "http://***@host/v1",
    f"https://host/v1?api_key={SECRET}&model=m": "https://host/v1?api_key=***&model=m",
    f"https://host/v1?model=m&access-token={SECRET}#part": "https://host/v1?model=m&access-token=***#part",
    f"https://host/f?code={SECRET},http://me:{SECRET}@other": "https://host/f?code=***,http://***@other",
    f"judge=http://me:{SECRET}@host/v1": "judge=http://***@host/v1",
    f"s3://key:{SECRET}@bucket/rows.jsonl": "s3://***@bucket/rows.jsonl",
    f"https://host/x?X-Amz-Signature={SECRET}": "https://host/x?X-Amz-Signature=***",
}
HARMLESS = [
    "http://host:5000/get_reward?max_tokens=5&model=a@b",
    "openai/gsm8k@main,rows.jsonl@0.5",
    "hf://datasets/owner/name@main/rows.jsonl",
    "user@host is no URL; see https://host/a?b=c.",
    "*** {} ***",
]


@pytest.mark.parametrize(("url", "shown"), URLS.items())
def test_url_secrets_are_masked_and_the_rest_is_shown(url: str, shown: str) -> None:
    assert without_secrets(f"asking {url} failed") == f"asking {shown} failed"
    assert is_hidden(shown) and not is_hidden(url)


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert without_secrets(text) == text
    assert not is_hidden(text)


def test_json_entries_with_secret_names_are_masked() -> None:
    plain = {
        "max_num_seqs": 4,
        "eos_token": "</s>",
        "image_token": "<image>",
        "sort_key": "length",
        "code": "x",
    }
    given = {
        "hf_token": SECRET,
        **plain,
        "extra": {"my_api_key": SECRET, "url": f"http://{SECRET}@host"},
    }
    shown = {"hf_token": "***", **plain, "extra": {"my_api_key": "***", "url": "http://***@host"}}
    assert hide(given) == shown
    assert is_hidden(shown) and not is_hidden(given)


def _with_secret(flag: Flag) -> Any:
    """Return a flag value that contains secrets, or None if the flag does not accept free text."""
    url = f"http://me:{SECRET}@host/a.jsonl?token={SECRET}"
    if flag.shape == "json":
        return {"hf_token": SECRET, "url": url}
    if flag.kind is not str or flag.choices:
        return None
    return (url,) if flag.shape == "list" else url


@pytest.mark.parametrize("command", COMMANDS)
def test_secret_of_a_flag_is_never_written(command: str) -> None:
    """Test every flag that accepts text: in configuration files, and in messages that quote it."""
    root = COMMANDS[command]
    tried = 0
    for path, flag in flags_of(root).items():
        value = _with_secret(flag)
        if value is None:
            continue
        config = amend(root(), {path: value, "given": {path: value}})
        assert SECRET not in dump_yaml(config) + dump_yaml(config, given_only=True)
        assert SECRET not in flag.typed(value)
        tried += 1
    assert tried


@pytest.mark.parametrize(
    "key", [path for path, flag in flags_of(COMMANDS["train_sft"]).items() if flag.secret]
)
def test_secret_key_is_neither_written_nor_quoted(key: str) -> None:
    flag = flags_of(COMMANDS["train_sft"])[key]
    assert not flag.saved and SECRET not in flag.typed(SECRET)


def test_run_uses_the_unmasked_url() -> None:
    url = next(iter(URLS))
    config = ppo(f"--reward.remote_url {url}")
    assert config.reward.urls == [url]


def test_errors_and_notices_mask_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    notice(f"asking {next(iter(URLS))}")
    assert SECRET not in capsys.readouterr().err
    found = violations("train_ppo_ray", f"--reward.remote_url ftp://me:{SECRET}@host")
    assert found and SECRET not in " ".join(found)
    assert SECRET not in str(ConfigError(next(iter(URLS))))


def test_file_with_a_masked_secret_requires_the_flag_on_the_command_line(tmp_path: Path) -> None:
    """The file is accepted if the command line also gives the flag."""
    url = next(iter(URLS))
    file = tmp_path / "config.yaml"
    config = ppo(f"--reward.remote_url {url}")
    file.write_text(dump_yaml(config, given_only=True))
    assert yaml.safe_load(file.read_text())["reward"]["remote_url"] == URLS[url]
    with pytest.raises(ConfigError) as error:
        parse_config(COMMANDS["train_ppo_ray"], ["--config", str(file)], command="train_ppo_ray")
    assert "--reward.remote_url" in str(error.value)
    words = ["--config", str(file), "--reward.remote_url", url]
    again = parse_config(COMMANDS["train_ppo_ray"], words, command="train_ppo_ray")
    assert again.reward.remote_url == url
