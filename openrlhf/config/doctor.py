"""Configuration of `doctor`, which checks the installation and the machine."""

from __future__ import annotations

from openrlhf.config.commands import Command
from openrlhf.config.flags import switch


class DoctorConfig(Command):
    """Check the installed packages and this machine."""

    json: bool = switch("Print the findings as JSON.")
