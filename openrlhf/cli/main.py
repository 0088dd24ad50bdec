"""`openrlhf VERB …`: the same programs as `python -m openrlhf.cli.…`, under shorter names."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from openrlhf import __version__
from openrlhf.cli.common import fail, flags_or_exit, plain_ends, prepare_process, train_offline
from openrlhf.config.commands import VERBS, Command
from openrlhf.config.flags import did_you_mean, nearest
from openrlhf.config.methods import command_of_method
from openrlhf.config.options import Reader


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of a verb (`sft` or `train_sft`) with the remaining arguments. Without a
    verb, list the verbs.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0].startswith("--local_rank="):  # deepspeed puts it in front
        arguments.append(arguments.pop(0))
    verb = arguments[0] if arguments else "--help"
    verb = next((short for short, known in VERBS.items() if known["command"] == verb), verb)
    if verb in ("-h", "--help"):
        print("usage: openrlhf VERB [--flag VALUE ...]      openrlhf VERB --help lists its flags\n")
        print("\n".join(f"  {name:15} {known['about']}" for name, known in VERBS.items()))
    elif verb == "--version":
        print(f"openrlhf {__version__}")
    elif verb in VERBS:
        words = arguments[2:] if arguments[:2] == ["reward", "test"] else arguments[1:]
        import_module(f"openrlhf.cli.{VERBS[verb]['command']}").main(words)
    else:
        run_plugin_task(verb, arguments[1:])


def run_plugin_task(verb: str, argv: Sequence[str]) -> None:
    """Train an offline task that a plug-in has registered."""
    prepare_process()  # plug-ins may import torch
    with plain_ends():
        Reader(Command, "").read(argv)  # which loads them
    # Looked up, not imported: if no plug-in imported the module, there are no tasks.
    tasks: Any = getattr(sys.modules.get("openrlhf.trainers.tasks"), "OFFLINE_TASKS", {})
    if verb not in tasks:
        known = list(dict.fromkeys([*VERBS, *tasks]))
        if (command := command_of_method(verb)) is not None:
            fail(
                f"there is no verb {verb}: use `openrlhf {command}` with the flags of your run (docs/algorithms.md)."
            )
        hint = did_you_mean(nearest(verb, known))
        fail(
            f"there is no verb {verb}; known are {', '.join(known)}.{hint} --plugin FILE.py adds your own."
        )
    train_offline(flags_or_exit(tasks[verb].root, argv, command=verb), verb)


if __name__ == "__main__":
    main()
