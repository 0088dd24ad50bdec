"""`python -m openrlhf.cli.batch_inference`: answers to the prompts of a dataset, or rewards of answers, in a file."""

from openrlhf.cli.common import one_process
from openrlhf.config.inference import BatchInferenceConfig

main = one_process(BatchInferenceConfig, "batch_inference", "openrlhf.evaluation.batch_inference:run_batch_inference")

if __name__ == "__main__":
    main()
