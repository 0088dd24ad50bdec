"""Evaluates a checkpoint: `python -m openrlhf.cli.eval`.

Measures pass@k, reward-model accuracy, or the win rate against another model.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(EvaluationConfig, argv, command="eval", on_ray=True) as config:
        with quick_imports():
            from openrlhf.evaluation.runs import run_evaluation

        run_evaluation(config)


if __name__ == "__main__":
    main()
