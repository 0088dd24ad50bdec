"""HTTP server for a reward model: `python -m openrlhf.cli.serve_rm`.

RL runs use the server with `--reward.remote_url`; other clients may use it too.
"""

from collections.abc import Sequence

from openrlhf.cli.common import single_process_command
from openrlhf.config.machine import quick_imports
from openrlhf.config.serving import ServeConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    with single_process_command(ServeConfig, argv, command="serve_rm") as config:
        with quick_imports():
            from openrlhf.serving.server import run_server

        run_server(config)


if __name__ == "__main__":
    main()
