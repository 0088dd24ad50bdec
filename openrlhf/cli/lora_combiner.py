"""Merges a LoRA adapter into its base model: `python -m openrlhf.cli.lora_combiner`."""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.combining import CombinerConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(CombinerConfig, argv, command="lora_combiner") as config:
        with quick_imports():
            from openrlhf.checkpoints.combine import combine

        combine(config)


if __name__ == "__main__":
    main()
