"""`python -m openrlhf.cli.train_rm`: a reward model from pairs; alone, or under `deepspeed --module` or `torchrun -m`."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, train_offline
from openrlhf.config.supervised import RMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    train_offline(flags_or_exit(RMConfig, argv, command="train_rm"), "rm")


if __name__ == "__main__":
    main()
