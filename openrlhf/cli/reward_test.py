"""Tests a reward before training: `python -m openrlhf.cli.reward_test`.

Runs a reward function, server or verifier on a dataset. Also available as `openrlhf reward test`.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.machine import quick_imports
from openrlhf.config.reward_test import RewardTestConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(RewardTestConfig, argv, command="reward_test") as config:
        with quick_imports():
            from openrlhf.evaluation.reward_test import try_reward

        try_reward(config)


if __name__ == "__main__":
    main()
