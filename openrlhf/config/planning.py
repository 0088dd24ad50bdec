"""Configuration of `plan`."""

from __future__ import annotations

from openrlhf.config.commands import Command
from openrlhf.config.flags import required, switch, unset

PLANNED = ("sft", "rm", "dpo", "kto", "prm", "kd", "ppo", "train_ppo")


class PlanConfig(Command):
    """Predict the memory of a training command, and whether it fits on a cluster."""

    command: str = required(
        "Training command to plan; may also be given as the first argument. Its own flags follow.",
        choices=PLANNED,
    )
    cluster: str | None = unset(
        "Cluster to plan for, such as 2x8xH100-80GB (nodes x GPUs x kind), 4x24GB or cpu-64GB; "
        "unset: this machine.",
    )
    longest: bool = switch("Find the largest --data.max_len that fits.")
    speed: bool = switch("Estimate the duration in seconds and the communication of a step.")
    json: bool = switch("Print JSON.")
