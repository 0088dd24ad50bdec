"""`python -m openrlhf.cli.eval`: pass@k of a checkpoint, accuracy of a reward model, or win rate against another."""

from openrlhf.cli.common import one_process
from openrlhf.config.evaluation import EvaluationConfig

main = one_process(EvaluationConfig, "eval", "openrlhf.evaluation.runs:run_evaluation")

if __name__ == "__main__":
    main()
