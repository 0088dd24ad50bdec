"""Commands and flag names printed on published pages about the project.

The commands in docs/launching.md are parsed exactly as printed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from openrlhf.config.options import ConfigError, parse_config
from openrlhf.config.supervised import RMConfig
from tests.config.commands import ROOTS, TRAINING, read_flags
from tests.config.printed import PRINTED, Printed
from tests.sources import ROOT

COMMANDS = ROOTS | {"train_rm": RMConfig}
each_printed = pytest.mark.parametrize("printed", PRINTED.values(), ids=PRINTED)


def violations(printed: Printed, more: str = "") -> list[str]:
    try:
        parse_config(
            COMMANDS[printed.command], [*printed.words, *more.split()], command=printed.command
        )
    except ConfigError as error:
        return error.violations
    return []


# ---- commands


@each_printed
@pytest.mark.parametrize("gpus", [0, 8])
def test_printed_command_reports_all_its_missing_flags_at_once(
    printed: Printed, gpus: int, gpu_machine: Callable[..., None]
) -> None:
    """The reported errors are the same on a laptop and on a machine with eight GPUs.

    None of the flags in the command is rejected.
    """
    gpu_machine(gpus, flash_attention=gpus > 0)
    found = violations(printed)
    missing = [text for text in found if text.startswith(printed.lacks)]
    assert len(missing) == len(printed.lacks)
    assert [text.split()[0] for text in found if text not in missing] == list(printed.not_yet)


@each_printed
@pytest.mark.parametrize("gpus", [0, 8])
def test_printed_command_with_the_missing_flags_is_accepted_except_for_unavailable_features(
    printed: Printed, gpus: int, gpu_machine: Callable[..., None]
) -> None:
    gpu_machine(gpus, flash_attention=gpus > 0)
    assert printed.missing.count("--") == len(printed.lacks)
    assert violations(printed, printed.missing) == [
        f"{flag} is not available yet: leave it out." for flag in printed.not_yet
    ]


@pytest.mark.parametrize("name", ["SFT", "RM", "DPO"])
def test_actor_flag_of_an_offline_command_sets_its_model(name: str) -> None:
    printed = PRINTED[name]
    given, notices = read_flags(COMMANDS[printed.command], printed.words, command=printed.command)
    assert given["model.model_name_or_path"] == printed.words[1]
    assert notices == ["--actor.model_name_or_path is now --model.model_name_or_path."]


def test_old_async_switch_causes_the_same_errors_as_the_current_flag() -> None:
    printed = PRINTED["asynchronous PPO"]
    older = Printed(text=printed.text.replace("--train.async_enable", "--async_train"))
    assert violations(older) == violations(printed)


# ---- flag names that the 2024 introduction prints with a single dash, with valid values

INTRODUCED = {
    "pretrain": "m",
    "dataset": "d",
    "dataset_probs": "0.5,0.4,0.1",
    "save_path": "out",
    "max_epochs": "1",
    "micro_train_batch_size": "2",
    "train_batch_size": "4",
    "learning_rate": "9e-6",
}
# Names that match two current flags; the error must name both flags.
TWO_MEANINGS = {("train_ppo_ray", "learning_rate"): ("--actor.adam.lr", "--critic.adam.lr")}
NAMES = [(command, name) for command in TRAINING for name in INTRODUCED]


@pytest.mark.parametrize("dashes", ["-", "--"])
@pytest.mark.parametrize(("command", "name"), [pair for pair in NAMES if pair not in TWO_MEANINGS])
def test_flag_name_from_the_introduction_sets_the_current_flag_with_a_notice(
    command: str, name: str, dashes: str
) -> None:
    words = [f"{dashes}{name}", INTRODUCED[name]]
    given, notices = read_flags(COMMANDS[command], words, command=command)
    ((path, value),) = given.items()
    assert str(value) in (INTRODUCED[name], str(float("9e-6")))
    assert len(notices) == 1 and notices[0].startswith(f"--{name} is now --{path}.")


@pytest.mark.parametrize("dashes", ["-", "--"])
@pytest.mark.parametrize(("command", "name"), TWO_MEANINGS)
def test_error_for_a_name_that_matches_two_flags_lists_both_flags(
    command: str, name: str, dashes: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(COMMANDS[command], [f"{dashes}{name}", INTRODUCED[name]], command=command)
    (sentence,) = caught.value.violations
    assert all(flag in sentence for flag in TWO_MEANINGS[command, name])


def test_script_with_flag_names_from_the_introduction_is_parsed() -> None:
    line = " ".join(f"-{name} {value}" for name, value in INTRODUCED.items())
    words = [*line.replace("-dataset d", "-dataset a,b,c").split(), "--output_key", "answer"]
    config = parse_config(COMMANDS["train_sft"], words, command="train_sft")
    assert (config.data.dataset, config.data.dataset_probs) == ("a,b,c", "0.5,0.4,0.1")
    assert (config.adam.lr, config.ckpt.output_dir) == (9e-6, "out")


def test_value_that_starts_with_a_dash_is_still_a_value() -> None:
    config = parse_config(
        COMMANDS["train_sft"],
        shlex.split("--pretrain m --dataset d --output_key o --save_steps -1"),
        command="train_sft",
    )
    assert config.ckpt.save_steps == -1


# ---- the commands in docs/launching.md

PAGE = (ROOT / "docs/launching.md").read_text()


def page_commands() -> list[tuple[str, str]]:
    """Return the name and the flags of every training command in docs/launching.md."""
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [
        (found[1], found[2])
        for line in lines
        if (found := re.search(r"openrlhf\.cli\.(\w+) ?(.*)", line))
    ]


@pytest.mark.parametrize(("command", "flags"), page_commands())
def test_commands_on_the_launching_page_are_accepted(command: str, flags: str) -> None:
    words = shlex.split(flags, comments=True)
    assert parse_config(COMMANDS[command], words, command=command).check() == []


def test_launching_page_shows_each_way_to_launch_each_command() -> None:
    ways = {
        "python -m": ("train_sft", "train_rm", "train_ppo_ray", "serve_rm"),
        "deepspeed --module": ("train_sft",),
        "torchrun --nproc_per_node 2 -m": ("train_rm",),
        "ray job submit": ("train_ppo_ray",),
    }
    joined = PAGE.replace("\\\n", " ")
    for way, commands in ways.items():
        for command in commands:
            assert re.search(
                rf"^{re.escape(way)}.*openrlhf\.cli\.{command}", joined, re.MULTILINE
            ), (way, command)
