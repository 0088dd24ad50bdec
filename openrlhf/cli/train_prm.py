"""`python -m openrlhf.cli.train_prm`: process reward model; alone, or under `deepspeed --module` or `torchrun -m`."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, train_offline
from openrlhf.config.supervised import PRMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    train_offline(flags_or_exit(PRMConfig, argv, command="train_prm"), "prm")


if __name__ == "__main__":
    main()
