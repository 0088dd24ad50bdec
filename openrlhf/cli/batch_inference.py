"""`python -m openrlhf.cli.batch_inference`: answers to the prompts of a dataset, or rewards of answers, in a file."""

from openrlhf.cli.common import ray_command
from openrlhf.config.inference import BatchInferenceConfig

main = ray_command(BatchInferenceConfig, "batch_inference", "openrlhf.evaluation.batch_inference:run_batch_inference")

if __name__ == "__main__":
    main()
