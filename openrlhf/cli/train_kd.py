"""Knowledge distillation: `python -m openrlhf.cli.train_kd`.

Runs as one process, or under `deepspeed --module` or `torchrun -m`.
"""

from collections.abc import Sequence

from openrlhf.cli.common import leave, read_flags, running
from openrlhf.config.machine import quick_imports
from openrlhf.config.supervised import KDConfig
from openrlhf.termination import in_order


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and train."""
    config = read_flags(KDConfig, argv, command="train_kd")
    with running(config):
        with quick_imports():
            from openrlhf.launch.offline import run_offline
            from openrlhf.trainers.distill import DistillationTask

        with in_order():
            run_offline(DistillationTask(config))
    leave(0)


if __name__ == "__main__":
    main()
