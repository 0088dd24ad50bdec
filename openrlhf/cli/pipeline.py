"""`openrlhf pipeline FILE.yaml`: stages in one file, each started when the stages before it are done."""

import sys
from collections.abc import Sequence

from openrlhf.cli.common import one_process
from openrlhf.config.pipeline import PipelineConfig

run = one_process(PipelineConfig, "pipeline", "openrlhf.launch.pipeline:run_pipeline", on_ray=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages; the first word may be the file."""
    words = sys.argv[1:] if argv is None else list(argv)
    run(["--file", *words] if words and not words[0].startswith("-") else words)


if __name__ == "__main__":
    main()
