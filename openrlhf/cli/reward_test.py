"""`openrlhf reward test`: a reward function, server or verifier on a dataset, before any training."""

import sys
from collections.abc import Sequence

from openrlhf.cli.common import one_process
from openrlhf.config.reward_test import RewardTestConfig

run = one_process(RewardTestConfig, "reward_test", "openrlhf.evaluation.reward_test:try_reward", on_ray=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Score, and exit with status 1 where too much failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    run(words[1:] if words[:1] == ["test"] else words)


if __name__ == "__main__":
    main()
