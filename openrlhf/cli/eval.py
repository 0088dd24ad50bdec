"""`python -m openrlhf.cli.eval`: pass@k of a checkpoint, accuracy of a reward model, or win rate against another."""

from collections.abc import Sequence

from openrlhf.cli.common import check_versions, flags_or_exit, plain_ends
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and evaluate."""
    config = flags_or_exit(EvaluationConfig, argv, command="eval", on_ray=True)
    check_versions()
    with quick_imports():  # after the flags: --help and mistakes answer without loading torch
        from openrlhf.evaluation.runs import run_evaluation

    with plain_ends():
        run_evaluation(config)


if __name__ == "__main__":
    main()
