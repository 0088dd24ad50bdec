"""Reinforcement learning on one machine: `python -m openrlhf.cli.train_ppo`.

May be started by `deepspeed --module`, as in older releases: rank 0 runs, the other ranks exit.
"""

from collections.abc import Sequence

from openrlhf.cli.common import become_only_process, check_versions, read_flags, running
from openrlhf.config.local_ppo import LocalPPOConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and run the command."""
    become_only_process()
    config = read_flags(LocalPPOConfig, argv, command="train_ppo", on_ray=True)
    check_versions()
    with running(config):
        with quick_imports():
            from openrlhf.launch.start import run_ppo

        run_ppo(config)


if __name__ == "__main__":
    main()
