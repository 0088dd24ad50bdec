"""`openrlhf reward test`: a reward function, server or verifier on a dataset, before any training."""

import sys
from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, plain_ends
from openrlhf.config.reward_test import RewardTestConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags, score, and exit with status 1 where too much failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    config = flags_or_exit(RewardTestConfig, words[1:] if words[:1] == ["test"] else words, command="reward_test")
    # After the flags: --help and mistakes answer without loading the datasets library.
    from openrlhf.evaluation.reward_test import try_reward

    with plain_ends():
        raise SystemExit(try_reward(config))


if __name__ == "__main__":
    main()
