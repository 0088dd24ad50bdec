"""Tests for parsing clusters."""

from __future__ import annotations

import pytest

from openrlhf.planning.cluster import parse_cluster
from openrlhf.planning.shapes import PlanError
from openrlhf.units import GIB


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "gib"),
    [
        ("2x8xH100-80GB", 2, 8, 80),
        ("8xA100-80GB", 1, 8, 80),
        ("8xA100-40GB", 1, 8, 40),
        ("4x24GB", 1, 4, 24),
        ("2x4x24GB", 2, 4, 24),
        ("8xH200", 1, 8, 141),
        ("128x8xH100", 128, 8, 80),
    ],
)
def test_cluster_of_gpus_has_nodes_devices_and_memory(
    text: str, nodes: int, per_node: int, gib: int
) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.per_node) == (nodes, per_node)
    assert cluster.device_bytes == gib * GIB
    assert cluster.on_gpus


def test_cpu_machine_has_the_specified_memory_or_else_the_free_memory() -> None:
    assert parse_cluster("cpu-64GB").device_bytes == 64 * GIB
    assert parse_cluster("cpu", free_bytes=123).device_bytes == 123
    assert not parse_cluster("cpu").on_gpus


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "8x",
        "x8",
        "8xFOO",
        "8xA100-80",
        "0x24GB",
        "4x0GB",
        "gpu",
        "2x8x2x24GB",
        "cpu-0GB",
        "2xcpu-64GB",
    ],
)
def test_error_for_an_invalid_cluster_quotes_its_text(text: str) -> None:
    with pytest.raises(PlanError, match=f"--cluster {text}"):
        parse_cluster(text)


def test_unknown_device_requires_a_memory_size() -> None:
    with pytest.raises(PlanError, match="FOO"):
        parse_cluster("8xFOO")
    assert parse_cluster("8xFOO-24GB").device_bytes == 24 * GIB


@pytest.mark.parametrize(("text", "same"), [("8xh100", "8xH100"), ("4x24gb", "4x24GB")])
def test_cluster_is_read_in_upper_and_lower_case(text: str, same: str) -> None:
    assert parse_cluster(text) == parse_cluster(same)


def test_unknown_kind_names_kinds_and_the_form_with_a_size() -> None:
    for kind in ("FOO", "H100x80GB"):
        with pytest.raises(PlanError, match="32GB") as raised:
            parse_cluster(f"8x{kind}")
        assert kind in str(raised.value) and "H100," in str(raised.value)
        assert f"{kind}-" not in str(raised.value)
