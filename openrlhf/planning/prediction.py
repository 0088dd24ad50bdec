"""The memory of a role on a device, in CPU memory and on a drive, predicted with `RoleMemory`."""

from __future__ import annotations

from dataclasses import replace

from openrlhf.planning.activations import input_bytes
from openrlhf.planning.constants import Constants
from openrlhf.planning.memory import RoleMemory
from openrlhf.planning.roles import ModelRole
from openrlhf.planning.trained import trained_weights
from openrlhf.planning.usage import Instant, Usage, largest


def predict_role(role: ModelRole, constants: Constants) -> dict[Instant, Usage]:
    """Return the peak of a role's device memory on one rank, by instant.

    If the device is a CPU, state that is offloaded to CPU memory is included. The memory of the
    process itself (`Constants.process_bytes`) is not included; it is added once per process.
    """
    memory = RoleMemory(role, constants)
    usage = {instant: memory.idle(awake=False) for instant in Instant}
    usage[Instant.LOAD] = memory.load_peak()
    usage[Instant.SCORE] = memory.score_peak()
    usage[Instant.PUBLISH] = memory.publish_peak()
    usage |= memory.train_peaks()
    if constants.device != "cpu":
        return usage
    for instant, host in predict_host(role, constants).items():
        usage[instant] += host
    if role.ema:
        # The average is copied from the loaded model.
        before = predict_role(replace(role, ema=False), constants)[Instant.LOAD]
        after = memory.idle_before_first_step() + predict_host(role, constants)[Instant.LOAD]
        usage[Instant.LOAD] = largest(before, after)
    return usage


def predict_host(role: ModelRole, constants: Constants) -> dict[Instant, Usage]:
    """Return the CPU memory that a role occupies on one rank, by instant.

    For ranks on GPUs, the machine must provide this memory in addition to the GPU memory.
    """
    memory = RoleMemory(role, constants)
    created = memory.gradients.host
    state = created
    if role.adam_offload:
        state += memory.optimizer_bytes
    if role.optimizer_on_drive:
        created, state = 0, 0
    if role.ema:
        # Under ZeRO 3, each rank averages its own part; otherwise, rank 0 averages all weights.
        # On GPUs, `machine_bytes` adds the average once.
        if role.sharded:
            state += 4 * memory.trained // role.ranks
        elif constants.device == "cpu":
            state += 4 * memory.trained
    kept = Usage(optimizer=state)
    if role.param_offload:
        kept += Usage(weights=memory.second_copy_bytes)
    if role.param_offload and not role.weights_on_drive:
        kept += Usage(weights=memory.weight_bytes)
    usage = dict.fromkeys(Instant, kept)
    # The first step creates the gradients of an offloaded optimizer.
    usage[Instant.LOAD] += Usage(optimizer=-created)
    if role.checkpoint_offload and role.training:
        inputs = Usage(activations=input_bytes(role, role.training))
        usage[Instant.FORWARD] += inputs
        usage[Instant.BACKWARD] += inputs
    if not role.sleeps:
        return usage
    asleep = kept + Usage(optimizer=memory.optimizer_bytes, gradients=memory.gradients.idle)
    awake = (Instant.LOAD, Instant.FORWARD, Instant.BACKWARD, Instant.STEP)
    return {instant: usage[instant] if instant in awake else asleep for instant in Instant}


def drive_bytes(role: ModelRole, constants: Constants) -> int:
    """Return the size of a role's state on the drive of one rank (--ds.nvme_path), in bytes."""
    memory = RoleMemory(role, constants)
    size = 0
    if role.optimizer_on_drive:
        size += memory.gradients.host + memory.optimizer_bytes
    if role.weights_on_drive:
        size += memory.weight_bytes
    return size


def machine_bytes(role: ModelRole, constants: Constants, ranks: int) -> int:
    """Return the CPU memory that a role on GPUs occupies on the machine of its rank 0, in bytes.

    `ranks` is the number of the role's ranks on this machine.
    """
    of_rank = max(usage.total for usage in predict_host(role, constants).values())
    average = 0
    if role.ema and not role.sharded:  # rank 0 averages all weights
        average = 4 * trained_weights(replace(role, tp=1))
    return ranks * of_rank + average
