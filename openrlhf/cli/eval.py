"""`python -m openrlhf.cli.eval`: pass@k of a checkpoint, accuracy of a reward model, or win rate against another."""

from openrlhf.cli.common import ray_command
from openrlhf.config.evaluation import EvaluationConfig

main = ray_command(EvaluationConfig, "eval", "openrlhf.evaluation.runs:run_evaluation")

if __name__ == "__main__":
    main()
