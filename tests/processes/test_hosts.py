"""Hosts: user code may do what it likes to its own process, and to nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openrlhf.processes.host_process import PROCESSES
from openrlhf.processes.hosts import HostDied, HostError, HostLoadError, HostPool, HostTimeout
from openrlhf.trajectory import Failure

FILES = Path(__file__).parents[1] / "rewards/reward_files"
TROUBLE = f"{FILES / 'trouble.py'}:"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pool(logs: Path) -> Iterator[HostPool]:
    with HostPool(2, memory_gib=1, log_dir=logs) as pool:
        yield pool


def call(pool: HostPool, name: str, *args: object, timeout: float = 20, **kwargs: object) -> object:
    target = name if ":" in name else TROUBLE + name
    return asyncio.run(pool.call(target, *args, timeout=timeout, **kwargs))


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def becomes_true(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_a_reply_that_is_read_late_does_not_cost_the_call_after_it(tmp_path: Path) -> None:
    """The loop that waits for it is busy until the deadline has passed."""

    async def busy(pool: HostPool) -> list[object]:
        calls = [asyncio.create_task(pool.call(TROUBLE + "nap", s, timeout=1.0)) for s in (0.9, 0.01)]
        await asyncio.sleep(0.5)
        time.sleep(1.5)
        return await asyncio.gather(*calls)

    with HostPool(1, memory_gib=1, log_dir=tmp_path) as pool:
        asyncio.run(pool.check(TROUBLE + "nap"))
        assert all(isinstance(pid, int) for pid in asyncio.run(busy(pool)))


def test_arguments_arrive_and_the_result_comes_back(pool: HostPool):
    images = [b"\x00\xff", None]
    answer = call(pool, "echo", 1, "two", [3.5], images=images, label={"a": (1, 2)})
    assert answer == [[1, "two", [3.5]], {"images": images, "label": {"a": [1, 2]}}]


def test_an_importable_function_is_a_target_too(pool: HostPool):
    assert call(pool, "math:hypot", 3, 4) == 5


def test_an_async_function_is_awaited_in_a_loop_that_stays():
    with HostPool(1) as single:
        assert call(single, "loop_stays") and call(single, "loop_stays")


def test_a_file_is_loaded_once_and_finds_its_neighbours():
    with HostPool(1) as single:
        assert [call(single, "count") for _ in range(3)] == [1, 2, 3]
        exact = f"{FILES / 'exact.py'}:reward_func"
        assert call(single, exact, ["2+2= 4"], ["2+2="], ["4"])["rewards"] == [1.0]
        assert call(single, "count") == 4


def test_what_user_code_prints_goes_to_the_log_and_never_into_the_answer(logs: Path, pool: HostPool):
    assert call(pool, "shout") == "quiet"
    printed = "".join(log.read_text() for log in logs.iterdir())
    for line in ("printed to stdout", "written to descriptor 1", "printed to stderr"):
        assert line in printed


def test_hosts_see_no_gpu_and_use_one_thread(pool: HostPool):
    assert call(pool, "environment", "CUDA_VISIBLE_DEVICES") == ""
    assert call(pool, "environment", "OMP_NUM_THREADS") == "1"


def test_a_host_imports_nothing_heavy_by_itself(pool: HostPool):
    heavy = {"torch", "vllm", "ray", "numpy", "transformers", "sympy", "deepspeed"}
    assert not heavy & set(call(pool, "modules"))


def test_tensors_and_arrays_come_back_as_plain_numbers(tmp_path: Path):
    file = tmp_path / "tensors.py"
    file.write_text(
        "import numpy, torch\n"
        "def all_kinds():\n"
        "    return [torch.ones(1, requires_grad=True), torch.tensor(2), numpy.float32(0.5),\n"
        "            numpy.arange(2), torch.tensor([0.25], dtype=torch.bfloat16),\n"
        "            {numpy.str_('a'): numpy.bool_(1)}]\n"
    )
    with HostPool(1) as pool:
        answer = call(pool, f"{file}:all_kinds", timeout=1)  # importing torch takes longer than that
    assert answer == [[1], 2, 0.5, [0, 1], [0.25], {"a": True}]


@pytest.mark.parametrize(
    ("function", "kind", "failure", "text"),
    [
        ("fail_with_a_failure_of_its_own", HostError, "exception", "ValueError: no way"),
        ("fail", HostError, "exception", r"in fail\n.*raise ValueError\(\"no way\"\)(\n|.)*ValueError: no way"),
        ("leave", HostError, "exit", "SystemExit: that is all"),
        ("fill_memory", HostError, "memory", r"MemoryError\n.*--reward.memory_gib is 1"),
        ("fill_memory_slowly", HostError, "memory", "in fill_memory_slowly(\n|.)*MemoryError"),
        ("opaque", HostError, "result", "returned type object; only numbers, text"),
        ("leave_at_once", HostDied, "exit", "leave_at_once ended its host: it exited with status 7"),
        ("crash", HostDied, "killed", "killed by signal 11(\n|.)*in crash"),
        ("hang", HostTimeout, "timeout", "hang took more than 0.3 s(\n|.)*line .* in hang"),
        ("hold_the_interpreter", HostTimeout, "timeout", "in hold_the_interpreter"),
        ("close_everything", HostDied, "killed", "close_everything ended its host"),
        ("huge", HostError, "memory result", "MemoryError|returned 536,870,9.. bytes, more than the 268,435,456"),
        ("absent", HostLoadError, "exception", "has no function absent; its functions are: echo, process"),
    ],
)
def test_trouble_is_an_error_within_the_deadline_and_the_next_call_works(
    pool: HostPool, function: str, kind: type[HostError], failure: str, text: str
):
    timeout = 0.3 if kind is HostTimeout else 20
    with pytest.raises(HostError, match=text) as caught:
        call(pool, function, timeout=timeout)
    assert type(caught.value) is kind or kind is HostError
    assert caught.value.failure in failure.split()
    assert call(pool, "echo", "fine") == [["fine"], {}]


def test_a_late_call_is_cut_at_its_own_deadline_and_delays_no_other(pool: HostPool):
    async def both() -> list[object]:
        late = asyncio.create_task(pool.call(TROUBLE + "hang", timeout=4.0))
        others = [await pool.call(TROUBLE + "echo", i, timeout=20) for i in range(50)]
        assert not late.done()
        with pytest.raises(HostTimeout):
            await late
        return others

    assert asyncio.run(both()) == [[[i], {}] for i in range(50)]


def test_the_children_of_a_killed_host_die_with_it(pool: HostPool, tmp_path: Path):
    with pytest.raises(HostTimeout):
        call(pool, "hang_with_child", str(tmp_path / "pids"), timeout=1)
    host, child = map(int, (tmp_path / "pids").read_text().split())
    assert becomes_true(lambda: not running(host) and not running(child))


def test_hosts_and_their_children_die_with_the_parent_even_inside_a_call(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from openrlhf.processes.hosts import HostPool\n"
        "pool = HostPool(2)\n"
        f"print(*(host.process.pid for host in pool._hosts), flush=True)\n"
        f"asyncio.run(pool.call({TROUBLE + 'hang_with_child'!r}, sys.argv[1], timeout=100))\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "pids")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert becomes_true(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    pids += map(int, (tmp_path / "pids").read_text().split())
    assert all(running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert becomes_true(lambda: not any(map(running, pids)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError(\n|.)*nothing_of_that_name"),
        ("def g(): pass\n", "no function f; its functions are: g"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_reported_with_its_traceback(
    pool: HostPool, tmp_path: Path, content: str | None, text: str
):
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(HostLoadError, match=text):
        asyncio.run(pool.check(f"{file}:f"))
    assert call(pool, "echo") == [[], {}]


def test_a_check_names_the_parameters(pool: HostPool):
    parameters = asyncio.run(pool.check(f"{FILES / 'exact.py'}:reward_func"))
    assert parameters == [
        *([name, "POSITIONAL_OR_KEYWORD", True] for name in ("queries", "prompts", "labels")),
        ["kwargs", "VAR_KEYWORD", False],
    ]


def test_loading_has_a_deadline_of_its_own(tmp_path: Path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(1)\ndef f(): return 'loaded'\n")
    with HostPool(1) as patient:
        assert call(patient, f"{file}:f", timeout=0.5) == "loaded"
    with HostPool(1, load_timeout=0.3) as hasty, pytest.raises(HostTimeout, match=r"loading .*slow.py:f"):
        asyncio.run(hasty.check(f"{file}:f"))


def test_a_fresh_host_has_loaded_what_was_checked_before_it_is_asked(tmp_path: Path):
    file = tmp_path / "notes.py"
    file.write_text(f"open({str(tmp_path / 'loads')!r}, 'a').write('x')\ndef f(): import os; os._exit(1)\n")
    with HostPool(1) as pool:
        asyncio.run(pool.check(f"{file}:f"))
        with pytest.raises(HostDied):
            call(pool, f"{file}:f")
        assert becomes_true(lambda: (tmp_path / "loads").read_text() == "xx")


def test_a_fresh_host_that_loads_several_functions_answers_each_call_with_its_own_result():
    async def die_and_go_on(pool: HostPool) -> object:
        for name in ("echo", "count", "process"):
            await pool.check(TROUBLE + name)
        with pytest.raises(HostDied):
            await pool.call(TROUBLE + "leave_at_once", timeout=20)
        return await pool.call(TROUBLE + "count", timeout=20)

    with HostPool(1) as pool:
        assert asyncio.run(die_and_go_on(pool)) == 1


def test_a_copy_of_a_host_that_user_code_forked_answers_nothing():
    with HostPool(1) as pool:
        assert [call(pool, "fork_and_return") for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_fork_bomb_that_leaves_its_session_is_bounded_and_nothing_is_left_of_it(tmp_path: Path):
    """Bounded by itself as well: copies that find no room sleep, and all of them end."""
    pids = tmp_path / "pids"
    with HostPool(1) as pool:
        with pytest.raises(HostTimeout) as caught:
            call(pool, "fork_bomb", str(pids), timeout=1.5)
        assert caught.value.failure is Failure.TIMEOUT
        assert call(pool, "echo", "fine") == [["fine"], {}]
    forked = [int(pid) for pid in pids.read_text().split()]
    assert 10 < len(forked) <= PROCESSES
    assert becomes_true(lambda: not any(map(running, forked)))  # a busy machine takes a while to end what was killed


def test_no_call_has_more_processes_than_the_limit():
    """As root too, whom the kernel would not count."""
    with HostPool(1) as pool:
        assert call(pool, "fork_until_refused", PROCESSES + 10) < PROCESSES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's hosts become other users")
def test_a_host_of_root_is_another_user_and_does_with_files_what_root_does(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    with HostPool(1) as pool:
        user, read, owner = call(pool, "use_files", str(secret), str(tmp_path / "new"))
    assert user != 0
    assert (read, owner) == ("root's", 0)


def test_no_more_calls_run_at_once_than_there_are_hosts(pool: HostPool):
    async def many() -> list[int]:
        return await asyncio.gather(*(pool.call(TROUBLE + "nap", 0.01, timeout=20) for _ in range(40)))

    assert len(set(asyncio.run(many()))) == 2


def test_waiting_for_a_host_does_not_count_against_the_deadline():
    async def queue_up() -> list[int]:
        return await asyncio.gather(*(pool.call(TROUBLE + "nap", 0.3, timeout=1.0) for _ in range(6)))

    with HostPool(1) as pool:
        assert len(asyncio.run(queue_up())) == 6


def test_one_pool_serves_several_event_loops_in_several_threads(pool: HostPool):
    async def some(start: int) -> list[object]:
        return await asyncio.gather(*(pool.call(TROUBLE + "echo", start + i, timeout=20) for i in range(50)))

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda start: asyncio.run(some(start)), (0, 100, 200, 300)))
    assert answers == [[[[start + i], {}] for i in range(50)] for start in (0, 100, 200, 300)]


def test_hosts_outlive_the_thread_that_started_them():
    pools: list[HostPool] = []
    starter = threading.Thread(target=lambda: pools.append(HostPool(1)))
    starter.start()
    starter.join()
    with pools[0] as pool:
        first = call(pool, "process")
        time.sleep(0.2)
        assert call(pool, "process") == first


def test_a_cancelled_call_frees_its_host(pool: HostPool):
    async def give_up() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.call(TROUBLE + "hang", timeout=100), 0.2)

    asyncio.run(give_up())
    assert call(pool, "echo") == [[], {}]


def test_a_cancelled_wait_loses_no_host():
    async def busy() -> object:
        running = asyncio.create_task(pool.call(TROUBLE + "nap", 0.5, timeout=20))
        await asyncio.sleep(0.05)
        waiting = [asyncio.create_task(pool.call(TROUBLE + "process", timeout=20)) for _ in range(3)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        assert await waiting[1] == await waiting[2] == await running
        return await pool.call(TROUBLE + "process", timeout=20)

    with HostPool(1) as pool:
        asyncio.run(busy())


def test_a_host_killed_between_calls_is_replaced_without_an_error():
    with HostPool(1) as pool:
        first = call(pool, "process")
        os.kill(first, signal.SIGKILL)
        assert becomes_true(lambda: not running(first))
        assert call(pool, "process") != first


def test_arguments_that_cannot_be_sent_are_an_error_of_the_call(pool: HostPool):
    with pytest.raises(HostError, match=r"the arguments of .* cannot be sent"):
        call(pool, "echo", lambda: None)


def test_closing_kills_every_host_and_ends_every_call():
    async def close_under_way() -> list[BaseException]:
        pool = HostPool(2)
        hosts = [host.process.pid for host in pool._hosts]
        calls = [asyncio.create_task(pool.call(TROUBLE + "hang", timeout=100)) for _ in range(4)]
        await asyncio.sleep(0.5)
        pool.close()
        assert not any(map(running, hosts))
        with pytest.raises(HostError, match="closed"):
            await pool.call(TROUBLE + "echo", timeout=1)
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(outcome, HostError) for outcome in asyncio.run(close_under_way()))
