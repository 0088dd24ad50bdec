"""`openrlhf VERB …`: the programs `python -m openrlhf.cli.…` under shorter names."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from openrlhf import __version__
from openrlhf.cli.common import (
    fail,
    leave,
    plain_ends,
    prepare_process,
    read_flags,
    running,
    words_of,
)
from openrlhf.config.flags import did_you_mean, nearest
from openrlhf.config.machine import quick_imports
from openrlhf.config.methods import command_of_method
from openrlhf.config.options import load_plugins_named_in
from openrlhf.reporting import say
from openrlhf.termination import in_order


@dataclass(frozen=True)
class Verb:
    """A command of `openrlhf`: its module in `openrlhf.cli`, and a line about it."""

    command: str
    about: str

    def run(self, argv: Sequence[str]) -> None:
        """Run the command. Only its own module is imported, so that --help answers at once."""
        import_module(f"openrlhf.cli.{self.command}").main(argv)


VERBS = {
    "sft": Verb("train_sft", "supervised fine-tuning"),
    "rm": Verb("train_rm", "reward model from preference pairs"),
    "dpo": Verb("train_dpo", "preference optimization from pairs: DPO, IPO, cDPO, SimPO, ORPO"),
    "kto": Verb("train_kto", "KTO, from answers that are desirable or not"),
    "prm": Verb("train_prm", "process reward model from labelled steps"),
    "kd": Verb("train_kd", "knowledge distillation from a teacher"),
    "ppo": Verb("train_ppo_ray", "reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO"),
    "train_ppo": Verb(
        "train_ppo",
        "the same on one machine, as deepspeed once started it: all models share its devices",
    ),
    "eval": Verb(
        "eval", "evaluation of a checkpoint: pass@k, accuracy of a reward model, win rate"
    ),
    "batch_inference": Verb(
        "batch_inference",
        "answers to the prompts of a dataset, or rewards of answers, in a file",
    ),
    "chat": Verb("interactive_chat", "a conversation with a model"),
    "reward": Verb("reward_test", "`reward test`: try a reward on a dataset, before any training"),
    "lora_combiner": Verb("lora_combiner", "merges a LoRA adapter into its base model"),
    "serve-rm": Verb("serve_rm", "HTTP server of a reward model"),
    "pipeline": Verb(
        "pipeline", "stages in one file, from SFT to RL: run, resumed, reported together"
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of a verb (`sft` or `train_sft`). Without a verb, list the verbs."""
    arguments = words_of(argv)
    if arguments and arguments[0].startswith("--local_rank="):  # deepspeed puts it first
        arguments.append(arguments.pop(0))
    name = arguments[0] if arguments else "--help"
    rest = arguments[1:]
    if name == "help":
        name, *rest = [*rest[:1], "--help", *rest[1:]]
    by_command = {verb.command: verb for verb in VERBS.values()}
    verb = VERBS.get(name) or by_command.get(name)
    if verb is VERBS["reward"] and rest and not rest[0].startswith("-"):
        if rest[0] != "test":
            fail(
                f"`openrlhf reward` has one command, test, not {rest[0]}: `openrlhf reward test "
                "--help` shows its flags."
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
    """Print each verb with a line about it."""
    lines = [
        "usage: openrlhf VERB [--flag VALUE ...]      openrlhf VERB --help lists its flags",
        "",
    ]
    lines += [f"  {name:15} {verb.about}" for name, verb in VERBS.items()]
    say(*lines)


def run_plugin_task(name: str, argv: Sequence[str]) -> None:
    """Train an offline task that a plug-in registers. Exit with status 2 if there is none."""
    prepare_process()  # plug-ins may import torch
    with plain_ends():
        load_plugins_named_in(argv)
    # Not imported here: if no plug-in imported the module, there are no tasks.
    tasks: Any = getattr(sys.modules.get("openrlhf.trainers.tasks"), "OFFLINE_TASKS", {})
    if name not in tasks:
        _refuse_verb(name, known=list(dict.fromkeys([*VERBS, *tasks])))
    task = tasks[name]
    config = read_flags(task.root, argv, command=name)
    with running(config):
        with quick_imports():
            from openrlhf.launch.offline import run_offline

        with in_order():
            run_offline(task(config))
    leave(0)


def _refuse_verb(name: str, *, known: Sequence[str]) -> None:
    command = command_of_method(name)
    if command is not None:
        fail(
            f"there is no verb {name}: use `openrlhf {command}` with the flags of your run "
            "(docs/algorithms.md)."
        )
    hint = did_you_mean(nearest(name, known))
    fail(
        f"there is no verb {name}; known verbs: {', '.join(known)}.{hint} --plugin FILE.py adds "
        "your own."
    )


if __name__ == "__main__":
    main()
