"""Reinforcement learning: `python -m openrlhf.cli.train_ppo_ray`.

Starts Ray or joins a running Ray cluster; may also be submitted as a Ray job.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.machine import quick_imports
from openrlhf.config.ppo import PPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(PPOConfig, argv, command="train_ppo_ray", on_ray=True) as config:
        with quick_imports():
            from openrlhf.launch.start import run_ppo

        run_ppo(config)


if __name__ == "__main__":
    main()
