"""Evaluation of a checkpoint: `python -m openrlhf.cli.eval`.

Measures pass@k, reward-model accuracy, or the win rate against another model.
"""

from collections.abc import Sequence

from openrlhf.cli.common import become_only_process, check_versions, read_flags, running
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and run the command."""
    become_only_process()
    config = read_flags(EvaluationConfig, argv, command="eval", on_ray=True)
    check_versions()
    with running(config):
        with quick_imports():
            from openrlhf.evaluation.runs import run_evaluation

        run_evaluation(config)


if __name__ == "__main__":
    main()
