"""Checks the installation and the machine: `python -m openrlhf.cli.doctor`."""

from collections.abc import Sequence

from openrlhf.cli.common import parse_flags
from openrlhf.config.doctor import DoctorConfig
from openrlhf.doctor.examination import examine


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags in `argv`, or in the arguments of this process, and run the command."""
    config = parse_flags(DoctorConfig, argv, command="doctor")
    examine(config)


if __name__ == "__main__":
    main()
