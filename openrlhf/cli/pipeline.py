"""Pipeline of stages: `openrlhf pipeline FILE.yaml`.

Each stage starts after the stages whose results it uses have finished.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command, words_of
from openrlhf.config.machine import quick_imports
from openrlhf.config.pipeline import PipelineConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the pipeline."""
    words = words_of(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--file")
    with single_process_command(PipelineConfig, words, command="pipeline") as config:
        with quick_imports():
            from openrlhf.launch.pipeline import run_pipeline

        run_pipeline(config)


if __name__ == "__main__":
    main()
