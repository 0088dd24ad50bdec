"""Merge of a LoRA adapter into its base model: `python -m openrlhf.cli.lora_combiner`."""

from collections.abc import Sequence

from openrlhf.cli.common import become_only_process, read_flags, running
from openrlhf.config.combining import CombinerConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and run the command."""
    become_only_process()
    config = read_flags(CombinerConfig, argv, command="lora_combiner")
    with running(config):
        with quick_imports():
            from openrlhf.checkpoints.combine import combine

        combine(config)


if __name__ == "__main__":
    main()
