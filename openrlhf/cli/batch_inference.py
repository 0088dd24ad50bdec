"""Batch inference: `python -m openrlhf.cli.batch_inference`.

Writes a file with answers to a dataset's prompts, or with rewards for the dataset's answers.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(
        BatchInferenceConfig, argv, command="batch_inference", on_ray=True
    ) as config:
        with quick_imports():
            from openrlhf.evaluation.batch_inference import run_batch_inference

        run_batch_inference(config)


if __name__ == "__main__":
    main()
