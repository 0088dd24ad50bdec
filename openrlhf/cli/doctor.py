"""Checks the installation and the machine: `python -m openrlhf.cli.doctor`."""

from collections.abc import Sequence

from openrlhf.cli.common import parse_flags
from openrlhf.config.doctor import DoctorConfig
from openrlhf.doctor.examination import examine


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and run the command."""
    config = parse_flags(DoctorConfig, argv, command="doctor")
    examine(config)


if __name__ == "__main__":
    main()
