"""The JSON schema of the flags, as printed by each command's `--help_json`."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from openrlhf.config.flags import flags_of
from openrlhf.config.options import parse_config
from openrlhf.config.schema import json_schema
from openrlhf.config.shared import TrainConfig
from tests.config.commands import COMMANDS


def properties(schema: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return the schema of each flag, keyed by the flag's path."""
    found: dict[str, dict[str, Any]] = {}
    for name, node in schema["properties"].items():
        if "properties" in node:
            found |= properties(node, f"{prefix}{name}.")
        else:
            found[prefix + name] = node
    return found


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    return request.param


def test_help_json_prints_a_valid_schema(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(COMMANDS[command], ["--help_json"], command=command)
    assert caught.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    assert printed["title"] == f"openrlhf {command}"


def test_schema_contains_every_flag(command: str) -> None:
    root = COMMANDS[command]
    found = properties(json_schema(root, command))
    assert sorted(found) == sorted(flags_of(root))
    for path, flag in flags_of(root).items():
        assert found[path]["title"] == flag.name
        assert found[path]["description"].startswith(flag.help)


def test_schema_accepts_the_default_of_each_flag(command: str) -> None:
    root = COMMANDS[command]
    found = properties(json.loads(json.dumps(json_schema(root, command))))
    for path, flag in flags_of(root).items():
        if isinstance(flag.default, float) and math.isinf(flag.default):
            assert "default" not in found[path]  # JSON cannot represent infinity
            continue
        Draft202012Validator(found[path]).validate(found[path]["default"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ds.param_dtype", "bf17"),
        ("adam.lr", -1),
        ("adam.lr", "fast"),
        ("adam.betas", [0.9]),
        ("adam.betas", [0.9, 1]),
        ("train.batch_size", 1.5),
        ("ds.packing_samples", "yes"),
        ("train.no_such_flag", 1),
    ],
)
def test_schema_rejects_invalid_values(path: str, value: object) -> None:
    section, _, leaf = path.partition(".")
    schema = json_schema(COMMANDS["train_sft"], "train_sft")
    with pytest.raises(ValidationError):
        Draft202012Validator(schema).validate({section: {leaf: value}})


def test_schema_describes_sections_conditions_and_secrets() -> None:
    schema = json_schema(COMMANDS["train_sft"], "train_sft")
    assert schema["properties"]["train"]["description"] == TrainConfig.__doc__
    found = properties(schema)
    assert found["ds.lora.alpha"]["x-no-effect"] == "without --ds.lora.rank"
    assert "x-no-effect" not in found["ds.lora.rank"]
    assert found["logger.wandb.key"]["writeOnly"] is True
    assert "Not available yet" in found["ds.experts_implementation"]["description"]
