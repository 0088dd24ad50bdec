"""Supervised fine-tuning: `python -m openrlhf.cli.train_sft`.

Runs as one process, or under `deepspeed --module` or `torchrun -m`.
"""

from collections.abc import Sequence

from openrlhf.cli.common import leave, read_flags, running
from openrlhf.config.machine import quick_imports
from openrlhf.config.supervised import SFTConfig
from openrlhf.termination import in_order


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and train."""
    config = read_flags(SFTConfig, argv, command="train_sft")
    with running(config):
        with quick_imports():
            from openrlhf.launch.offline import run_offline
            from openrlhf.trainers.sft import SFTTask

        with in_order():
            run_offline(SFTTask(config))
    leave(0)


if __name__ == "__main__":
    main()
