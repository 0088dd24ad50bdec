"""Batch inference: `python -m openrlhf.cli.batch_inference`.

Writes answers to a dataset's prompts, or rewards of its answers, to a file.
"""

from collections.abc import Sequence

from openrlhf.cli.common import become_only_process, check_versions, read_flags, running
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.machine import quick_imports


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and run the command."""
    become_only_process()
    config = read_flags(BatchInferenceConfig, argv, command="batch_inference", on_ray=True)
    check_versions()
    with running(config):
        with quick_imports():
            from openrlhf.evaluation.batch_inference import run_batch_inference

        run_batch_inference(config)


if __name__ == "__main__":
    main()
