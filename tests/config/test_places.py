"""No command overwrites its inputs. Every output of every command is tested with every input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import Flag, amend, flags_of
from openrlhf.config.places import OWNED, inputs, model_in, outputs, overwriting
from tests.config.commands import COMMANDS, parse

CHECKPOINTED = {"ckpt.save_steps": 5}


def with_values(command: str, values: dict[str, Any]) -> Any:
    """Return a command's unresolved configuration with the given values, keyed by path."""
    root = COMMANDS[command]
    known = {
        path: value for path, value in (CHECKPOINTED | values).items() if path in flags_of(root)
    }
    return amend(root(), known | {"given": known})


def written() -> list[tuple[str, Flag]]:
    """Return each output flag that can overwrite existing files, with its command."""
    found: list[tuple[str, Flag]] = []
    for command, root in COMMANDS.items():
        used = {
            output.path: output.kind
            for output in outputs(with_values(command, all_places(command)))
        }
        kinds = [kind for kind in used.values() if kind not in ("stages", "events")]
        assert set(kinds) <= {*OWNED, "file"}
        found += [
            (command, flag) for flag in flags_of(root).values() if used.get(flag.path) in kinds
        ]
    return found


def all_places(command: str) -> dict[str, str]:
    """Return a value for each output flag of a command: a path named after the flag."""
    return {flag.path: flag.path for flag in flags_of(COMMANDS[command]).values() if flag.writes}


def refusals(config: Any) -> list[str]:
    return list(overwriting(config))


def value_of(flag: Flag, path: Path) -> Any:
    return (str(path),) if flag.shape == "list" else str(path)


@pytest.mark.parametrize(
    ("command", "output"),
    [pytest.param(*each, id=f"{each[0]} {each[1].name}") for each in written()],
)
def test_output_that_overwrites_an_input_is_refused(
    command: str, output: Flag, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    link = tmp_path / "link"
    link.symlink_to(place)
    reads, spelled = place, os.path.relpath(link)
    if output.writes == "run":
        place.mkdir()
        reads = place / "samples.jsonl"
    if output.writes == "file":
        place.write_text("{}")
        spelled = str(place)
    sources = [
        flag for flag in flags_of(COMMANDS[command]).values() if flag.holds and not flag.writes
    ]
    assert sources
    for source in sources:
        if output.path == "rollout.dump_dir" and source.path == "rollout.replay_dir":
            continue  # a replay writes no episodes
        config = with_values(command, {source.path: value_of(source, reads), output.path: spelled})
        sentences = refusals(config)
        assert len(sentences) == 1, source.path
        assert output.name in sentences[0] and source.name in sentences[0]
        elsewhere = with_values(
            command, {source.path: value_of(source, tmp_path / "input"), output.path: spelled}
        )
        assert refusals(elsewhere) == [], source.path


def test_every_output_of_every_command_is_declared() -> None:
    written = {
        (command, flag.path)
        for command, root in COMMANDS.items()
        for flag in flags_of(root).values()
        if flag.writes
    }
    assert {path for _, path in written} == {
        "ckpt.output_dir", "ckpt.path", "run.dir", "rollout.dump_dir", "logger.tensorboard_dir",
        "output_path",
    }  # fmt: skip
    assert {
        ("batch_inference", "output_path"),
        ("lora_combiner", "output_path"),
        ("pipeline", "run.dir"),
    } <= written


@pytest.mark.parametrize(
    ("read", "refused"),
    [
        ("ckpt", True),  # the output folder itself
        ("ckpt/model-00001-of-00002.safetensors", True),
        ("ckpt/tokenizer_config.json", True),
        ("ckpt/base", False),  # another model inside the folder
        ("ckpt/rows.jsonl", False),
        (".", False),
        ("ckpt2", False),
    ],
)
def test_only_inputs_that_an_export_replaces_are_refused(
    read: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = with_values(
        "train_sft",
        {"model.model_name_or_path": read, "ckpt.output_dir": "ckpt", "ckpt.path": "saved"},
    )
    assert bool(refusals(config)) == refused


def test_model_next_to_a_checkpoint_is_refused_as_input_if_checkpoints_are_written() -> None:
    values = {"model.model_name_or_path": "saved/global_step5_hf", "ckpt.path": "saved"}
    assert refusals(with_values("train_sft", values))
    assert not refusals(with_values("train_sft", values | {"ckpt.save_steps": -1})), (
        "no checkpoint is written"
    )


def test_output_inside_a_data_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for output in ("run.dir", "ckpt.output_dir", "ckpt.path"):
        config = with_values(
            "train_sft",
            {"data.dataset": f"hub/name,{tmp_path}/rows", output: f"{tmp_path}/rows/out"},
        )
        assert len(refusals(config)) == 1, output


def test_output_file_may_not_replace_a_file_in_the_run_folder() -> None:
    assert refusals(
        with_values("batch_inference", {"run.dir": "a", "output_path": "a/samples.jsonl"})
    )
    assert not refusals(
        with_values("batch_inference", {"run.dir": "a", "output_path": "a/answers.jsonl"})
    )


def test_run_without_checkpoints_does_not_claim_the_checkpoint_folder() -> None:
    def claims(command: str, line: str) -> bool:
        return any(output.kind == "checkpoints" for output in outputs(parse(command, line)))

    assert not claims("train_sft", "")
    assert not claims("train_sft", "--eval.dataset e")
    for line in ("--ckpt.save_steps 5", "--ckpt.load_enable", "--eval.dataset e --eval.patience 2"):
        assert claims("train_sft", line)
    assert not claims("train_sft", "--ckpt.save_steps 5 --ckpt.disable_ds")
    assert claims("train_dpo", "--ref.precompute")
    assert claims("train_ppo_ray", "--eval.dataset e --eval.steps 1")
    assert not claims("train_ppo_ray", "--rollout.only")


def test_saved_critic_is_an_output() -> None:
    line = (
        "--critic.save_value_network --algo.advantage.estimator gae "
        "--critic.model_name_or_path ckpt_critic"
    )
    (sentence,) = refusals(parse_unchecked(line))
    assert (
        "--critic.save_value_network" in sentence
        and "--critic.model_name_or_path ckpt_critic" in sentence
    )


def parse_unchecked(line: str) -> Any:
    flags = line.split()
    values = {
        "critic.save_value_network": "--critic.save_value_network" in flags,
        "algo.advantage.estimator": "gae",
        "critic.model_name_or_path": flags[-1],
    }
    return with_values("train_ppo_ray", values)


def test_description_names_the_model_in_a_folder(tmp_path: Path) -> None:
    assert model_in(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    assert str(model_in(str(tmp_path))).startswith("Qwen2ForCausalLM")
    (tmp_path / "config.json").write_text("[]")
    assert model_in(str(tmp_path))


def test_input_named_by_several_flags_is_listed_once() -> None:
    config = with_values(
        "train_ppo_ray", {"actor.model_name_or_path": "m", "critic.model_name_or_path": "./m"}
    )
    assert [flag.path for flag, _ in inputs(config)] == ["actor.model_name_or_path"]
