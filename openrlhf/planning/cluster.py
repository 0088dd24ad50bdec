"""Clusters in text form, such as 2x8xH100-80GB, and the kinds of devices they can contain."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openrlhf.planning.shapes import PlanError
from openrlhf.units import GIB

EXAMPLES = "2x8xH100-80GB (nodes x GPUs x kind), 8xA100-80GB, 4x24GB, cpu or cpu-64GB"
CLUSTER = re.compile(
    r"(?:(\d+)x)?(\d+)x(?:([A-Za-z][A-Za-z0-9]*)(?:-|$))?(?:(\d+(?:\.\d+)?)GB)?", re.IGNORECASE
)
CPU_MACHINE = re.compile(r"cpu(?:-(\d+(?:\.\d+)?)GB)?", re.IGNORECASE)


@dataclass(frozen=True)
class DeviceKind:
    """A kind of GPU: the memory in GB that its name states, and the rates from its data sheet."""

    memory: float
    teraflops: float  # dense bfloat16 tensor cores, 10¹² operations per second
    memory_bandwidth: float  # GB/s
    link: float  # GB/s per direction to the other GPUs of the machine (NVLink, else PCIe)


# Rates from NVIDIA's data sheets.
# The sheets give NVLink's bandwidth for both directions together, so the rate is halved here.
KINDS_OF_DEVICES = {
    "V100": DeviceKind(32, 125, 900, 150),
    "A100": DeviceKind(80, 312, 2039, 300),
    "A800": DeviceKind(80, 312, 2039, 200),
    "H100": DeviceKind(80, 989, 3350, 450),
    "H800": DeviceKind(80, 989, 3350, 200),
    "H200": DeviceKind(141, 989, 4800, 450),
    "H20": DeviceKind(96, 148, 4000, 450),
    "B200": DeviceKind(180, 2250, 8000, 900),
    "L40S": DeviceKind(48, 362, 864, 32),
    "A10": DeviceKind(24, 125, 600, 32),
    "L4": DeviceKind(24, 121, 300, 32),
    "RTX3090": DeviceKind(24, 71, 936, 32),
    "RTX4090": DeviceKind(24, 165, 1008, 32),
}
UNNAMED = KINDS_OF_DEVICES["RTX4090"]  # device whose rates are used if only a memory size is given


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of one kind, each with the same number of devices."""

    nodes: int = 1
    per_node: int = 1
    kind: str = ""  # a key of `KINDS_OF_DEVICES`, or empty
    device_bytes: int  # memory of a device or, without GPUs, of a machine
    on_gpus: bool = True

    @property
    def devices(self) -> int:
        """The number of devices in all machines."""
        return self.nodes * self.per_node

    @property
    def rates(self) -> DeviceKind:
        """The kind of GPU whose rates apply to a device."""
        return KINDS_OF_DEVICES.get(self.kind, UNNAMED)

    def __str__(self) -> str:
        memory = f"{self.device_bytes / GIB:.4g} GiB"
        if not self.on_gpus:
            return f"a CPU machine with {memory}"
        device = f"{self.kind} {memory}".strip()
        if self.nodes == 1:
            return f"{self.per_node} x {device}"
        return f"{self.nodes} machines of {self.per_node} x {device}"


def parse_cluster(text: str, *, free_bytes: int = 0) -> Cluster:
    """Parse the description of a cluster.

    One GB is 2³⁰ bytes, as in the names of GPUs. The text `cpu` without a size means `free_bytes`
    of memory. Raises PlanError for malformed text, and for an unknown device without a size.
    """
    machine = CPU_MACHINE.fullmatch(text)
    if machine and not machine[1]:
        return Cluster(device_bytes=free_bytes, on_gpus=False)
    if machine and float(machine[1]) > 0:
        return Cluster(device_bytes=round(float(machine[1]) * GIB), on_gpus=False)
    found = CLUSTER.fullmatch(text)
    if found is None or not (found[3] or found[4]):
        raise PlanError(f"--cluster {text} is not a valid cluster. Examples: {EXAMPLES}.")
    nodes, per_node, kind, memory = found.groups()
    kind = (kind or "").upper()
    if kind == "CPU":
        raise PlanError(f"--cluster {text}: a plan without GPUs is for one machine: use cpu-64GB.")
    if not memory and kind not in KINDS_OF_DEVICES:
        raise PlanError(
            f"--cluster {text}: the memory size of {found[3]} is not known. Add the size in GB "
            f"after a hyphen, e.g. {per_node}xRTX5090-32GB, or use one of "
            f"{', '.join(KINDS_OF_DEVICES)}."
        )
    size = float(memory or KINDS_OF_DEVICES[kind].memory)
    cluster = Cluster(
        nodes=int(nodes or 1),
        per_node=int(per_node),
        kind=kind,
        device_bytes=round(size * GIB),
    )
    if cluster.devices == 0 or size == 0:
        raise PlanError(f"--cluster {text} has no devices or no memory. Examples: {EXAMPLES}.")
    return cluster
