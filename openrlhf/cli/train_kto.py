"""`python -m openrlhf.cli.train_kto`: KTO; alone, or under `deepspeed --module` or `torchrun -m`."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, train_offline
from openrlhf.config.supervised import KTOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    train_offline(flags_or_exit(KTOConfig, argv, command="train_kto"), "kto")


if __name__ == "__main__":
    main()
