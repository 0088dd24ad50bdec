"""`python -m openrlhf.cli.lora_combiner`: merge an adapter into its base model."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, plain_ends
from openrlhf.config.combining import CombinerConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and merge."""
    config = flags_or_exit(CombinerConfig, argv, command="lora_combiner")
    with quick_imports(), plain_ends():  # after the flags: --help and mistakes answer without loading torch
        from openrlhf.checkpoints.combine import combine

        combine(config)


if __name__ == "__main__":
    main()
