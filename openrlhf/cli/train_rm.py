"""`python -m openrlhf.cli.train_rm`: a reward model from pairs; alone, or under `deepspeed --module` or `torchrun -m`."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.cli.common import check_folders, flags_or_exit, plain_ends, prepare_process
from openrlhf.config.supervised import RMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    config = flags_or_exit(RMConfig, argv, command="train_rm")
    check_folders(config)
    prepare_process()
    # After the flags: --help and mistakes answer without loading torch.
    from openrlhf.trainers.reward import run_rm
    from openrlhf.trainers.supervised import USER_ERRORS

    with plain_ends(*USER_ERRORS):
        run_rm(config)


if __name__ == "__main__":
    main()
