"""Runs `openrlhf plan`, which prints the memory plan of a training command for any cluster.

This module imports no heavy library.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from openrlhf.config import machine
from openrlhf.config.flags import ConfigError, amend, flags_of, mentions
from openrlhf.config.local_ppo import LocalPPOConfig
from openrlhf.config.options import Reader
from openrlhf.config.planning import PlanConfig
from openrlhf.config.stages import STAGE_COMMANDS, StageCommand
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.launch.planning import advised, this_machine
from openrlhf.planning import advice, table
from openrlhf.planning.cluster import Cluster, parse_cluster
from openrlhf.planning.model_files import read_shape
from openrlhf.planning.plan import make_plan
from openrlhf.planning.step_time import step_lines
from openrlhf.reporting import notice, say

FEWER_DEVICES = (
    "Lower the numbers of devices: --actor.num_nodes and --actor.num_gpus_per_node (also for ref, "
    "critic and reward), --vllm.num_engines and --vllm.tensor_parallel_size. With "
    "--train.colocate_all, all models and engines share the policy's devices."
)
LOCAL_PPO = {"train_ppo": StageCommand("train_ppo", LocalPPOConfig)}


def print_plan(config: PlanConfig, words: Sequence[str]) -> None:
    """Print the plan of the training command whose flags are `words`."""
    if config.cluster is None:
        cluster = this_machine()
    else:
        cluster = parse_cluster(config.cluster, free_bytes=machine.free_memory())
    planned = planned_config(config.command, words, cluster)
    plan = make_plan(planned, cluster)
    found = table.as_json(plan)
    lines = table.lines(plan)
    if plan.shortage:
        lines += ["", FEWER_DEVICES]
    elif not plan.fits:
        nearest = advice.nearest_fit(planned, cluster)
        lines += ["", *advised(planned, cluster, nearest)]
        found["nearest"] = nearest and dict(nearest.flags)
    if config.speed:
        estimate = step_lines(planned, cluster)
        lines += ["", *estimate]
        found["speed"] = estimate
    if config.longest:
        longest = advice.longest_length(planned, cluster)
        sentence = f"The largest --data.max_len that fits with these flags is {longest}."
        trained = planned.model if isinstance(planned, SupervisedConfig) else planned.actor
        positions = read_shape(trained.model_name_or_path).positions
        if longest == 0:
            sentence = f"--data.max_len {advice.LENGTH_STEP} is already too long for these flags."
        elif 0 < positions < longest:
            sentence += f" The model has only {positions} positions."
        lines += ["", sentence]
        found["longest"] = longest
    if config.json:
        lines = [json.dumps(found, indent=2)]
    say(*lines)


def planned_config(command: str, words: Sequence[str], cluster: Cluster) -> Any:
    """Resolve the configuration of a training command on a cluster.

    Raises ConfigError for mistakes in flags set by the user. Requirements that do not affect
    memory, such as data and rewards, may be missing; a notice lists the missing requirements.
    """
    machine.only_plans = True
    machine.cluster_gpus = 0
    if cluster.on_gpus:
        machine.cluster_gpus = cluster.devices
    # The rules of offline commands depend on WORLD_SIZE.
    # A CPU machine can run any number of processes.
    os.environ.pop("WORLD_SIZE", None)
    if cluster.on_gpus:
        os.environ["WORLD_SIZE"] = str(cluster.devices)
    stage = (STAGE_COMMANDS | LOCAL_PPO)[command]
    root: Any = stage.flags
    reader = Reader(root, stage.command).read(words)
    given = reader.given
    config, _ = amend(root(), {**given, "given": given}).resolve(command=stage.command)
    named = set(given)
    for flag in flags_of(root).values():
        if flag.required and flag.holds == "model":
            named.add(flag.path)
    mistakes: list[str] = []
    missing: list[str] = []
    for sentence in config.check():
        if mentions(sentence, named):
            mistakes.append(sentence)
        else:
            missing.append(sentence)
    if reader.problems or mistakes:
        raise ConfigError([*reader.problems, *mistakes])
    notice(*(f"Required before the command can start: {sentence}" for sentence in missing))
    return config
