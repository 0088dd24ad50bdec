"""Reinforcement learning on one machine: `python -m openrlhf.cli.train_ppo`.

May be started by `deepspeed --module`, as in older releases: rank 0 runs the command, and all other
ranks exit.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.local_ppo import LocalPPOConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(LocalPPOConfig, argv, command="train_ppo", on_ray=True) as config:
        with quick_imports():
            from openrlhf.launch.start import run_ppo

        run_ppo(config)


if __name__ == "__main__":
    main()
