"""`python -m openrlhf.cli.train_dpo`: direct preference optimization; alone, or under `deepspeed --module` or `torchrun -m`."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, train_offline
from openrlhf.config.supervised import DPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    train_offline(flags_or_exit(DPOConfig, argv, command="train_dpo"), "dpo")


if __name__ == "__main__":
    main()
