"""Formats a plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf.planning.plan import Plan, Pool
from openrlhf.planning.usage import KINDS, Instant, Usage, gib
from openrlhf.units import GIB, MIB

SHOWN = tuple(instant for instant in Instant if instant is not Instant.IDLE)
HEADINGS = {"kv_cache": "KV cache"}
LABEL = 12  # width of the first column
COLUMN = 12
SMALL = 8 * GIB  # below this total, plans are shown in MiB
UNMEASURED = "Some constants for this kind of device are estimates."


def lines(plan: Plan) -> list[str]:
    """Return the table of a plan: one block per group of devices."""
    whose = "per device"
    if not plan.cluster.on_gpus:
        whose = "for all processes"
    unit, name = GIB, "GiB"
    if max(pool.total(pool.peak) for pool in plan.pools) < SMALL:
        unit, name = MIB, "MiB"
    shown = [f"Memory plan for {plan.cluster}, in {name} {whose}."]
    for pool in plan.pools:
        shown += _block(pool, unit, on_gpus=plan.cluster.on_gpus)
    if plan.shortage:
        shown.append(plan.shortage)
    if not plan.constants.measured:
        shown.append(UNMEASURED)
    return shown


def summary(plan: Plan) -> str:
    """Return one sentence per pool, with its peak, the phase of the peak and the largest part."""
    return " ".join(_verdict(pool) for pool in plan.pools)


def _block(pool: Pool, unit: int, *, on_gpus: bool) -> Iterator[str]:
    """Yield a pool's lines: each model's memory at the peak by kind, and totals by instant."""
    peak = pool.at(pool.peak)
    total = Usage()
    for usage in peak.values():
        total += usage
    kinds = [kind for kind in KINDS if getattr(total, kind)]
    yield ""
    where = pool.name
    if on_gpus:
        where += f" on {pool.count} device(s)"
    yield f"{where}; the peak is in {pool.peak}"
    yield _row("", [HEADINGS.get(kind, kind) for kind in kinds] + ["total"])
    for name, usage in [*peak.items(), ("total", total)]:
        sizes = [getattr(usage, kind) for kind in kinds]
        yield _row(name, [_number(size, unit) for size in [*sizes, usage.total]])
    yield _row("at", [str(instant) for instant in SHOWN])
    yield _row("", [_number(pool.total(instant), unit) for instant in SHOWN])
    yield _verdict(pool)
    if pool.host_bytes:
        yield f"CPU memory for offloaded state: {gib(pool.host_bytes)} per machine."
    if pool.drive_bytes:
        yield f"Space on the drive (--ds.nvme_path): {gib(pool.drive_bytes)} per machine."


def _verdict(pool: Pool) -> str:
    """Return a sentence with the verdict on a pool, its peak and the peak's largest part."""
    name, kind, size = pool.cause
    share = pool.total(pool.peak) / max(1, pool.capacity)
    verdict = "fits" if pool.fits else "does not fit"
    text = (
        f"{pool.name}: {verdict}. Peak {gib(pool.total(pool.peak))} of {gib(pool.capacity)} "
        f"({share:.0%}) in {pool.peak}; the largest part is {HEADINGS.get(kind, kind)} "
        f"({name}, {gib(size)})."
    )
    if pool.room < 0 <= pool.room + pool.reserved:
        text += f" A plan leaves {gib(pool.reserved)} free, because predictions may be too low."
    return " ".join([text, *pool.problems])


def _number(size: int, unit: int) -> str:
    if not size:
        return "-"
    if unit == MIB:
        return f"{size / unit:,.0f}"
    return f"{size / unit:.2f}"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:{LABEL}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan in machine-readable form: bytes by pool, instant, model and kind."""
    pools: list[dict[str, Any]] = []
    for pool in plan.pools:
        instants: dict[str, Any] = {}
        for instant in Instant:
            held = pool.at(instant)
            models = {name: vars(usage) for name, usage in held.items()}
            instants[instant] = {"total": pool.total(instant), "models": models}
        pools.append(
            {
                "name": pool.name,
                "devices": pool.count,
                "capacity": pool.capacity,
                "peak": {"instant": pool.peak, "bytes": pool.total(pool.peak)},
                "fits": pool.fits,
                "problems": list(pool.problems),
                "cpu_bytes_per_machine": pool.host_bytes,
                "drive_bytes_per_machine": pool.drive_bytes,
                "instants": instants,
            }
        )
    return {
        "cluster": str(plan.cluster),
        "fits": plan.fits,
        "measured": plan.constants.measured,
        "devices_needed": plan.devices,
        "pools": pools,
    }
