"""`python -m openrlhf.cli.train_kd`: knowledge distillation; alone, or under `deepspeed --module` or `torchrun -m`."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, train_offline
from openrlhf.config.supervised import KDConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    train_offline(flags_or_exit(KDConfig, argv, command="train_kd"), "kd")


if __name__ == "__main__":
    main()
