"""`openrlhf COMMAND …`: short names for the programs `python -m openrlhf.cli.…`."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from openrlhf import __version__
from openrlhf.cli.common import (
    fail,
    multi_process_command,
    pipe_may_close,
    plain_ends,
    prepare_process,
    words_of,
)
from openrlhf.config.commands import Command
from openrlhf.config.flags import did_you_mean, nearest
from openrlhf.config.machine import quick_imports
from openrlhf.config.methods import command_of_method
from openrlhf.config.options import Reader
from openrlhf.reporting import say


class Verb(NamedTuple):
    """A command of `openrlhf`: its module in `openrlhf.cli` and a one-line description."""

    command: str
    about: str

    def run(self, argv: Sequence[str]) -> None:
        """Run the command. Imports only the command's module, to keep --help fast."""
        import_module(f"openrlhf.cli.{self.command}").main(argv)


VERBS = {
    "sft": Verb("train_sft", "supervised fine-tuning"),
    "rm": Verb("train_rm", "reward model from preference pairs"),
    "dpo": Verb("train_dpo", "preference optimization from pairs: DPO, IPO, cDPO, SimPO, ORPO"),
    "kto": Verb("train_kto", "KTO, from answers labeled desirable or undesirable"),
    "prm": Verb("train_prm", "process reward model from labeled steps"),
    "kd": Verb("train_kd", "knowledge distillation from a teacher"),
    "ppo": Verb("train_ppo_ray", "reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO"),
    "train_ppo": Verb(
        "train_ppo",
        "same as ppo, on one machine: all models share its devices; may be started by deepspeed",
    ),
    "plan": Verb("plan", "predict the memory of a training command on a cluster"),
    "eval": Verb("eval", "evaluate a checkpoint: pass@k, reward-model accuracy, win rate"),
    "batch_inference": Verb(
        "batch_inference",
        "answers to a dataset's prompts, or rewards of its answers, written to a file",
    ),
    "chat": Verb("interactive_chat", "interactive chat with a model"),
    "reward": Verb("reward_test", "`reward test`: try a reward on a dataset before training"),
    "lora_combiner": Verb("lora_combiner", "merge a LoRA adapter into its base model"),
    "serve-rm": Verb("serve_rm", "HTTP server for a reward model"),
    "doctor": Verb("doctor", "check the installed packages and this machine"),
    "pipeline": Verb(
        "pipeline", "several stages defined in one file, from SFT to RL, with one report"
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command (`sft` or `train_sft`). Without arguments, list the commands."""
    name, *rest = words_of(argv) or ["--help"]
    # the deepspeed launcher puts this flag first
    if name.startswith("--local_rank="):
        name, *rest = [*rest, name]
    if name == "help":
        name, *rest = [*rest[:1], "--help", *rest[1:]]
    by_command = {verb.command: verb for verb in VERBS.values()}
    verb = VERBS.get(name) or by_command.get(name)
    if verb is VERBS["reward"] and rest and not rest[0].startswith("-"):
        if rest[0] != "test":
            fail(
                f"`openrlhf reward` has no subcommand {rest[0]}; its only subcommand is test. "
                "`openrlhf reward test --help` lists its flags."
            )
        rest = rest[1:]
    if verb:
        verb.run(rest)
    elif name in ("-h", "--help"):
        list_verbs()
    elif name == "--version":
        say(f"openrlhf {__version__}")
    else:
        run_plugin_task(name, rest)


def list_verbs() -> None:
    """Print each command with its description."""
    usage = (
        "usage: openrlhf COMMAND [--flag VALUE ...]      openrlhf COMMAND --help lists its flags"
    )
    lines = [usage, "", *(f"  {name:15} {verb.about}" for name, verb in VERBS.items())]
    with pipe_may_close():
        say(*lines)


def run_plugin_task(name: str, argv: Sequence[str]) -> None:
    """Train an offline task registered by a plugin.

    Exit with status 2 if no plugin defines the task.
    """
    prepare_process()  # plugins may import torch
    with plain_ends():
        Reader(Command, "").read(argv)  # loads the plug-ins; other flags are not checked
    # If no plugin has imported the module that registers tasks, there are no tasks.
    tasks: Any = getattr(sys.modules.get("openrlhf.trainers.tasks"), "OFFLINE_TASKS", {})
    if name not in tasks:
        command = command_of_method(name)
        if command is not None:
            fail(
                f"unknown command {name}: use `openrlhf {command}` with your run's flags "
                "(docs/algorithms.md)."
            )
        known = list(dict.fromkeys([*VERBS, *tasks]))
        hint = did_you_mean(nearest(name, known))
        fail(
            f"unknown command {name}; available commands: {', '.join(known)}.{hint} --plugin "
            "FILE.py adds your own."
        )
    task = tasks[name]
    with multi_process_command(task.root, argv, command=name) as config:
        with quick_imports():
            from openrlhf.launch.offline import run_offline

        run_offline(task(config))


if __name__ == "__main__":
    main()
