"""`python -m openrlhf.cli.train_ppo_ray`: reinforcement learning; alone (starts Ray itself), or as a Ray job."""

from collections.abc import Sequence

from openrlhf.cli.common import check_versions, flags_or_exit, plain_ends
from openrlhf.config.machine import quick_imports
from openrlhf.config.ppo import PPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and train."""
    config = flags_or_exit(PPOConfig, argv, command="train_ppo_ray", on_ray=True)
    check_versions()
    with quick_imports():  # after the flags: --help and mistakes answer without loading torch
        from openrlhf.launch.start import run_ppo

    with plain_ends():
        run_ppo(config)


if __name__ == "__main__":
    main()
