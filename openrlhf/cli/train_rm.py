"""Reward model training: `python -m openrlhf.cli.train_rm`.

Runs as one process, or under `deepspeed --module` or `torchrun -m`.
"""

from collections.abc import Sequence

from openrlhf.cli.common import multi_process_command
from openrlhf.config.machine import quick_imports
from openrlhf.config.supervised import RMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and train."""
    with multi_process_command(RMConfig, argv, command="train_rm") as config:
        with quick_imports():
            from openrlhf.launch.offline import run_offline
            from openrlhf.trainers.reward import RewardTask

        run_offline(RewardTask(config))


if __name__ == "__main__":
    main()
