"""`openrlhf pipeline FILE.yaml`: stages in one file, each started when the stages before it are done."""

import sys
from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, plain_ends
from openrlhf.config.pipeline import PipelineConfig
from openrlhf.termination import in_order


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags, check the stages, run them."""
    words = sys.argv[1:] if argv is None else list(argv)
    named = words[:1] and not words[0].startswith("-")
    config = flags_or_exit(PipelineConfig, ["--file", *words] if named else words, command="pipeline")
    # After the flags: --help and mistakes answer without loading Jinja2 and YAML.
    from openrlhf.launch.pipeline import Pipeline

    with plain_ends(), in_order():
        Pipeline.of(config).run(dry=config.dry_run)


if __name__ == "__main__":
    main()
