"""Interactive chat with a model: `python -m openrlhf.cli.interactive_chat`."""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.inference import ChatConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(ChatConfig, argv, command="interactive_chat") as config:
        with quick_imports():
            from openrlhf.evaluation.chat import run_chat

        run_chat(config)


if __name__ == "__main__":
    main()
