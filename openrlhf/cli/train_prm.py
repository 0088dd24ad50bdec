"""Process reward model training: `python -m openrlhf.cli.train_prm`.

Runs as one process, or under `deepspeed --module` or `torchrun -m`.
"""

from collections.abc import Sequence

from openrlhf.cli.common import multi_process_command
from openrlhf.config.machine import quick_imports
from openrlhf.config.supervised import PRMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and train."""
    with multi_process_command(PRMConfig, argv, command="train_prm") as config:
        with quick_imports():
            from openrlhf.launch.offline import run_offline
            from openrlhf.trainers.process_reward import ProcessRewardTask

        run_offline(ProcessRewardTask(config))


if __name__ == "__main__":
    main()
