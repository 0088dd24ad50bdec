"""The Ray process watch: deaths, restarts, reset connections, and closing."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue

import pytest

from openrlhf.cluster.ray_watch import RayProcess, RayWatch
from openrlhf.training.devices import free_port

SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("up", flush=True)
    connections = []
    while True:
        connections.append(server.accept())
        print("connected", flush=True)
"""
Server = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def server() -> Iterator[Server]:
    started: list[subprocess.Popen[str]] = []

    def start(port: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_connection(process: subprocess.Popen[str]) -> None:
    """Wait until the watch has connected to a server."""
    assert process.stdout and process.stdout.readline() == "connected\n"


def test_watch_reports_only_the_first_of_two_dead_processes(server: Server) -> None:
    ports = [free_port(), free_port()]
    processes = [server(port) for port in ports]
    losses = Queue[RayProcess]()
    names = ["store", "daemon"]
    RayWatch(
        [
            RayProcess(name=name, address=("127.0.0.1", port), own=True)
            for name, port in zip(names, ports, strict=True)
        ],
        losses.put,
    )
    for process in processes:
        wait_for_connection(process)
    processes[1].kill()
    assert losses.get(timeout=60).name == "daemon"
    processes[0].kill()
    processes[0].wait()
    time.sleep(0.5)
    assert losses.empty()


def test_watch_ignores_a_process_that_restarts_within_the_grace_period(server: Server) -> None:
    port, losses = free_port(), Queue[RayProcess]()
    first = server(port)
    watch = RayWatch(
        [RayProcess(name="store", address=("127.0.0.1", port), own=False, patience_s=300)],
        losses.put,
    )
    wait_for_connection(first)
    first.kill()
    first.wait()
    wait_for_connection(server(port))
    assert losses.empty()
    watch.close()


def test_reset_connection_is_not_reported_while_the_process_still_answers() -> None:
    losses = Queue[RayProcess]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        RayWatch([RayProcess(name="daemon", address=server.getsockname(), own=True)], losses.put)
        for _ in range(2):
            connection, _ = server.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()  # resets the connection
        last, _ = server.accept()
        assert losses.empty()
    last.close()
    assert losses.get(timeout=60).name == "daemon"


def test_closed_watch_reports_nothing(server: Server) -> None:
    port, losses = free_port(), Queue[RayProcess]()
    process = server(port)
    watch = RayWatch([RayProcess(name="store", address=("127.0.0.1", port), own=True)], losses.put)
    wait_for_connection(process)
    watch.close()
    process.kill()
    process.wait()
    time.sleep(0.5)
    assert losses.empty()


def test_closing_a_watch_after_a_loss_does_not_return() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    losses = Queue[RayProcess]()
    watch = RayWatch([RayProcess(name="store", address=("127.0.0.1", port), own=True)], losses.put)
    assert losses.get(timeout=60).name == "store"
    closing = threading.Thread(target=watch.close, daemon=True)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
