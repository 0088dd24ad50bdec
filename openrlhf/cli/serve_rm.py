"""`python -m openrlhf.cli.serve_rm`: a trained reward model as an HTTP server, for `--reward.remote_url` and others."""

from collections.abc import Sequence

from openrlhf.cli.common import flags_or_exit, plain_ends
from openrlhf.config.machine import quick_imports
from openrlhf.config.serving import ServeConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and serve."""
    config = flags_or_exit(ServeConfig, argv, command="serve_rm")
    with quick_imports():  # after the flags: --help and mistakes answer without loading torch
        from openrlhf.serving.server import run_server

    with plain_ends():
        run_server(config)


if __name__ == "__main__":
    main()
