"""The process pool: user code may damage its own process but not other processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from openrlhf.core.trajectory import Failure
from openrlhf.isolation import pool as pool_module
from openrlhf.isolation import process as process_module
from openrlhf.isolation.pool import ProcessPool, UserCodeError
from openrlhf.isolation.program import PROCESSES

FILES = Path(__file__).parents[1] / "rewards/reward_files"
TROUBLE = f"{FILES / 'trouble.py'}:"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pool(logs: Path) -> Iterator[ProcessPool]:
    with closing(ProcessPool(2, memory_gib=0.25, log_dir=logs)) as pool:
        yield pool


PATIENCE = 60.0  # seconds to wait for a process to end by itself, even on a slow machine


def call(
    pool: ProcessPool, name: str, *args: object, timeout: float = PATIENCE, **kwargs: object
) -> object:
    target = name if ":" in name else TROUBLE + name
    return asyncio.run(pool.call(target, *args, timeout=timeout, **kwargs))


def running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def becomes_true(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def test_call_that_finishes_in_time_succeeds_even_if_the_event_loop_is_blocked(
    tmp_path: Path,
) -> None:
    """The event loop that awaits the call is blocked until the call's deadline has passed."""

    async def busy(pool: ProcessPool) -> object:
        calling = asyncio.create_task(pool.call(TROUBLE + "nap", 0.01, timeout=1.0))
        await asyncio.sleep(0)
        time.sleep(2)
        return await calling

    with closing(ProcessPool(1, log_dir=tmp_path)) as pool:
        asyncio.run(pool.check(TROUBLE + "nap"))
        assert isinstance(asyncio.run(busy(pool)), int)


def test_arguments_and_result_are_passed_between_processes(pool: ProcessPool):
    images = [b"\x00\xff", None]
    answer = call(pool, "echo", 1, "two", [3.5], images=images, label={"a": (1, 2)})
    assert answer == [[1, "two", [3.5]], {"images": images, "label": {"a": [1, 2]}}]


def test_function_of_an_installed_package_can_be_called(pool: ProcessPool):
    assert call(pool, "math:hypot", 3, 4) == 5


def test_async_functions_of_a_process_share_one_event_loop():
    with closing(ProcessPool(1)) as single:
        assert call(single, "loop_stays") and call(single, "loop_stays")


def test_file_is_loaded_only_once_and_can_import_from_its_folder():
    with closing(ProcessPool(1)) as single:
        assert [call(single, "count") for _ in range(3)] == [1, 2, 3]
        exact = f"{FILES / 'exact.py'}:reward_func"
        assert call(single, exact, ["2+2= 4"], ["2+2="], ["4"])["rewards"] == [1.0]
        assert call(single, "count") == 4


def test_output_of_user_code_goes_to_the_log_and_not_into_the_result(logs: Path, pool: ProcessPool):
    assert call(pool, "shout") == "quiet"
    printed = "".join(log.read_text() for log in logs.iterdir())
    for line in ("printed to stdout", "written to descriptor 1", "printed to stderr"):
        assert line in printed


def test_user_process_has_no_visible_gpu_and_uses_one_thread(pool: ProcessPool):
    assert call(pool, "environment", "CUDA_VISIBLE_DEVICES") == ""
    assert call(pool, "environment", "OMP_NUM_THREADS") == "1"


def test_user_process_imports_no_heavy_packages_by_itself(pool: ProcessPool):
    heavy = {"torch", "vllm", "ray", "numpy", "transformers", "sympy", "deepspeed"}
    assert not heavy & set(call(pool, "modules"))


def test_tensors_and_arrays_are_returned_as_plain_numbers(tmp_path: Path):
    file = tmp_path / "tensors.py"
    file.write_text(
        "import numpy, torch\n"
        "def all_kinds():\n"
        "    return [torch.ones(1, requires_grad=True), torch.tensor(2), numpy.float32(0.5),\n"
        "            numpy.arange(2), torch.tensor([0.25], dtype=torch.bfloat16),\n"
        "            {numpy.str_('a'): numpy.bool_(1)}]\n"
    )
    with closing(ProcessPool(1)) as pool:
        answer = call(pool, f"{file}:all_kinds")
    assert answer == [[1], 2, 0.5, [0, 1], [0.25], {"a": True}]


@pytest.mark.parametrize(
    ("function", "failure", "text"),
    [
        ("fail_with_a_failure_of_its_own", "exception", "ValueError: no way"),
        (
            "fail",
            "exception",
            r"in fail\n.*raise ValueError\(\"no way\"\)(\n|.)*ValueError: no way",
        ),
        ("leave", "exit", "SystemExit: that is all"),
        ("fill_memory", "memory", r"MemoryError\n.*--reward.memory_gib is 0.25"),
        ("fill_memory_slowly", "memory", "in fill_memory_slowly(\n|.)*MemoryError"),
        ("opaque", "result", "returned type object; only numbers, text"),
        ("leave_at_once", "exit", "leave_at_once ended its process: it exited with status 7"),
        ("crash", "killed", r"killed by signal 11, Segmentation fault\.(\n|.)*in crash"),
        ("hang", "timeout", "hang took more than 0.3 s(\n|.)*line .* in hang"),
        (
            "hang_in_await",
            "timeout",
            "took more than 0.3 s .--reward.timeout. and was interrupted(\n|.)*in hang_in_await",
        ),
        ("hold_the_interpreter", "timeout", "in hold_the_interpreter"),
        ("close_everything", "killed exit", "close_everything ended its process"),
        ("write_to_every_socket", "killed", "write_to_every_socket ended its process"),
        ("write_none_to_every_socket", "killed", "ended its process"),
        ("write_dict_to_every_socket", "killed", "ended its process"),
        ("huge", "memory", "MemoryError"),
        ("absent", "exception", "has no function absent; its functions are: echo, process"),
    ],
)
def test_misbehaving_function_fails_within_its_deadline_and_the_next_call_works(
    pool: ProcessPool, function: str, failure: str, text: str
):
    timeout = 0.3 if failure == "timeout" else PATIENCE
    with pytest.raises(UserCodeError, match=text) as caught:
        call(pool, function, timeout=timeout)
    assert caught.value.failure in failure.split()
    assert call(pool, "echo", "fine") == [["fine"], {}]


def test_hanging_call_is_stopped_at_its_own_deadline_without_delaying_other_calls(
    pool: ProcessPool,
):
    async def both() -> list[object]:
        late = asyncio.create_task(pool.call(TROUBLE + "hang", timeout=8.0))
        others = [await pool.call(TROUBLE + "echo", i, timeout=PATIENCE) for i in range(50)]
        with pytest.raises(UserCodeError):
            await late
        return others

    assert asyncio.run(both()) == [[[i], {}] for i in range(50)]


def test_children_of_a_killed_process_die_with_it(pool: ProcessPool, tmp_path: Path):
    pids = tmp_path / "pids"

    async def give_up() -> None:
        calling = asyncio.create_task(
            pool.call(TROUBLE + "hang_with_child", str(pids), timeout=PATIENCE)
        )
        await asyncio.to_thread(
            becomes_true, lambda: pids.exists() and len(pids.read_text().split()) == 2
        )
        calling.cancel()

    asyncio.run(give_up())
    process, child = map(int, pids.read_text().split())
    assert becomes_true(lambda: not running(process) and not running(child))


def test_user_processes_and_daemons_die_if_the_run_is_killed_during_a_call(
    tmp_path: Path,
):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from openrlhf.isolation.pool import ProcessPool\n"
        "pool = ProcessPool(2)\n"
        f"print(asyncio.run(pool.call({TROUBLE + 'process'!r}, timeout=100)), flush=True)\n"
        f"asyncio.run(pool.call({TROUBLE + 'hang_with_child'!r}, sys.argv[1], timeout=100))\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "pids")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert becomes_true(
        lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2
    )
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
def test_file_that_cannot_be_loaded_is_reported_with_a_traceback(
    pool: ProcessPool, tmp_path: Path, content: str | None, text: str
):
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserCodeError, match=text):
        asyncio.run(pool.check(f"{file}:f"))
    assert call(pool, "echo") == [[], {}]


def test_check_returns_the_parameters_of_a_function(pool: ProcessPool):
    parameters = asyncio.run(pool.check(f"{FILES / 'exact.py'}:reward_func"))
    assert parameters == [
        *([name, "POSITIONAL_OR_KEYWORD", True] for name in ("queries", "prompts", "labels")),
        ["kwargs", "VAR_KEYWORD", False],
    ]


def test_loading_has_its_own_deadline(tmp_path: Path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(1)\ndef f(): return 'loaded'\n")
    with closing(ProcessPool(1)) as patient:
        assert call(patient, f"{file}:f", timeout=0.5) == "loaded"


def test_file_that_hangs_on_load_is_reported_and_killed_at_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pool_module, "LOAD_S", 2.0)
    monkeypatch.setattr(process_module, "SLOW_LOAD_S", 0.5)
    file = tmp_path / "hangs.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    with (
        closing(ProcessPool(1, log_dir=tmp_path)) as pool,
        pytest.raises(UserCodeError, match=r"hangs.py:f took more than 2 s(\n|.)*line 2 in"),
    ):
        asyncio.run(pool.check(f"{file}:f"))
    assert f"loading {file}:f has taken 0.5 s so far; its limit is 2 s." in capsys.readouterr().err


def test_replacement_process_loads_the_file_before_the_next_call(tmp_path: Path):
    file = tmp_path / "notes.py"
    file.write_text(
        f"open({str(tmp_path / 'loads')!r}, 'a').write('x')\ndef f(): import os; os._exit(1)\n"
    )
    with closing(ProcessPool(1)) as pool:
        asyncio.run(pool.check(f"{file}:f"))
        with pytest.raises(UserCodeError):
            call(pool, f"{file}:f")
        assert becomes_true(lambda: (tmp_path / "loads").read_text() == "xx")


def test_replacement_process_that_loads_several_functions_returns_each_calls_own_result():
    async def die_and_go_on(pool: ProcessPool) -> object:
        for name in ("echo", "count", "process"):
            await pool.check(TROUBLE + name)
        with pytest.raises(UserCodeError):
            await pool.call(TROUBLE + "leave_at_once", timeout=PATIENCE)
        return await pool.call(TROUBLE + "count", timeout=PATIENCE)

    with closing(ProcessPool(1)) as pool:
        assert asyncio.run(die_and_go_on(pool)) == 1


def test_fork_made_by_user_code_sends_no_results():
    with closing(ProcessPool(1)) as pool:
        assert [call(pool, "fork_and_return") for _ in range(5)] == [1, 2, 3, 4, 5]


def test_fork_bomb_that_leaves_its_session_is_limited_and_fully_killed(tmp_path: Path):
    """The fork bomb also limits itself: a copy that cannot fork sleeps, and every copy exits."""
    pids = tmp_path / "pids"
    with closing(ProcessPool(1)) as pool:
        with pytest.raises(UserCodeError) as caught:
            call(pool, "fork_bomb", str(pids), timeout=3)
        assert caught.value.failure is Failure.TIMEOUT
        assert call(pool, "echo", "fine") == [["fine"], {}]
    forked = [int(pid) for pid in pids.read_text().split()]
    assert 10 < len(forked) <= PROCESSES
    assert becomes_true(
        lambda: not any(map(running, forked))
    )  # killed processes take a while to disappear on a busy machine


def test_call_cannot_start_more_processes_than_the_limit():
    """The limit also applies to root, whose processes the kernel would not limit."""
    with closing(ProcessPool(1)) as pool:
        assert call(pool, "fork_until_refused", PROCESSES + 10) < PROCESSES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_user_process_started_by_root_has_another_uid_but_keeps_roots_file_access(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    with closing(ProcessPool(1)) as pool:
        user, read, owner = call(pool, "use_files", str(secret), str(tmp_path / "new"))
    assert user != 0
    assert (read, owner) == ("root's", 0)


def test_no_more_calls_run_concurrently_than_there_are_processes(pool: ProcessPool):
    async def many() -> list[int]:
        return await asyncio.gather(
            *(pool.call(TROUBLE + "nap", 0.05, timeout=PATIENCE) for _ in range(40))
        )

    assert len(set(asyncio.run(many()))) <= 2


def test_waiting_for_a_process_does_not_count_against_the_deadline():
    async def queue_up() -> list[int]:
        return await asyncio.gather(*(pool.call(TROUBLE + "nap", 2, timeout=6.0) for _ in range(4)))

    with closing(ProcessPool(1)) as pool:
        assert len(asyncio.run(queue_up())) == 4


def test_one_pool_serves_several_event_loops_in_several_threads(pool: ProcessPool):
    async def some(start: int) -> list[object]:
        return await asyncio.gather(
            *(pool.call(TROUBLE + "echo", start + i, timeout=PATIENCE) for i in range(50))
        )

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda start: asyncio.run(some(start)), (0, 100, 200, 300)))
    assert answers == [[[[start + i], {}] for i in range(50)] for start in (0, 100, 200, 300)]


def test_processes_outlive_the_thread_that_started_them():
    pools: list[ProcessPool] = []
    starter = threading.Thread(target=lambda: pools.append(ProcessPool(1)))
    starter.start()
    starter.join()
    with closing(pools[0]) as pool:
        first = call(pool, "process")
        time.sleep(0.2)
        assert call(pool, "process") == first


def test_cancelled_call_frees_its_process(pool: ProcessPool):
    async def give_up() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.call(TROUBLE + "hang", timeout=100), 0.2)

    asyncio.run(give_up())
    assert call(pool, "echo") == [[], {}]


def test_cancelling_a_queued_call_does_not_lose_a_process():
    async def busy() -> object:
        running = asyncio.create_task(pool.call(TROUBLE + "nap", 0.5, timeout=PATIENCE))
        await asyncio.sleep(0.05)
        waiting = [
            asyncio.create_task(pool.call(TROUBLE + "process", timeout=PATIENCE)) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        assert await waiting[1] == await waiting[2] == await running
        return await pool.call(TROUBLE + "process", timeout=PATIENCE)

    with closing(ProcessPool(1)) as pool:
        asyncio.run(busy())


def test_process_killed_between_calls_is_replaced_without_an_error():
    with closing(ProcessPool(1)) as pool:
        first = call(pool, "process")
        os.kill(first, signal.SIGKILL)
        # A call that is made before the pool notices the death would be blamed for killing the
        # process.
        [process] = pool._shared._processes
        assert becomes_true(lambda: not running(first) and process.retiring)
        assert call(pool, "process") != first


def test_call_with_unpicklable_arguments_raises_an_error(pool: ProcessPool):
    with pytest.raises(UserCodeError, match=r"the arguments of .* cannot be sent"):
        call(pool, "echo", lambda: None)


def test_close_kills_all_processes_and_fails_all_calls(tmp_path: Path):
    async def close_under_way() -> list[BaseException]:
        pool = ProcessPool(2)
        both = await asyncio.gather(
            *(pool.call(TROUBLE + "meet", str(tmp_path), timeout=PATIENCE) for _ in range(2))
        )
        calls = [
            asyncio.create_task(pool.call(TROUBLE + "hang", timeout=PATIENCE)) for _ in range(4)
        ]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(pool.close)
        assert len(set(both)) == 2 and not any(map(running, both))
        with pytest.raises(UserCodeError, match="closed"):
            await pool.call(TROUBLE + "echo", timeout=1)
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(close_under_way())
    assert [str(outcome) for outcome in outcomes] == ["the pool of processes was closed"] * 4


def test_process_full_of_leaked_children_is_replaced_and_the_error_names_the_limit():
    with closing(ProcessPool(1)) as pool:
        first = call(pool, "leak", PROCESSES // 2)
        with pytest.raises(
            UserCodeError, match="reached the limit of 512 processes and threads"
        ) as caught:
            call(pool, "leak", PROCESSES // 2)
        assert caught.value.failure is Failure.EXCEPTION and "BlockingIOError" in str(caught.value)
        assert call(pool, "leak", PROCESSES // 2) != first


def test_blocking_io_error_from_a_pipe_is_not_mistaken_for_the_process_limit():
    with closing(ProcessPool(1)) as pool:
        process = call(pool, "process")
        with pytest.raises(UserCodeError, match="BlockingIOError") as caught:
            call(pool, "read_an_empty_pipe")
        assert "limit" not in str(caught.value)
        assert call(pool, "process") == process


def test_oversized_log_keeps_its_beginning_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "LOG_BYTES", 400_000)
    monkeypatch.setattr(pool_module, "LOG_KEPT", 100_000)
    monkeypatch.setattr(pool_module, "LOG_SECONDS", 0.01)
    log = tmp_path / "user-0.log"
    with closing(ProcessPool(1, log_dir=tmp_path)) as pool:
        for part in range(4):
            call(pool, "babble", part, 300_000)
            assert becomes_true(lambda: log.stat().st_size <= 400_000)
        call(pool, "babble", 4, 10)
    said = log.read_text()
    assert said.startswith("part 0\n") and said.endswith("part 4\n" + "x" * 10)
    found = re.search(r"\n\[([\d,]+) bytes were removed here to shorten the log\]\n", said)
    assert found
    removed = int(found[1].replace(",", ""))
    assert 1_000_000 <= removed + said.count("x") <= 1_200_200


def test_call_whose_log_was_removed_fails_when_its_process_ends(tmp_path: Path) -> None:
    with closing(ProcessPool(1, log_dir=tmp_path)) as pool:
        with pytest.raises(UserCodeError, match="exited with status 7"):
            call(pool, "remove_and_leave", str(tmp_path / "user-0.log"))
        assert call(pool, "echo", "fine") == [["fine"], {}]


def test_process_without_a_writable_log_prints_to_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    with closing(ProcessPool(1, log_dir=logs)) as pool:
        logs.rmdir()
        assert call(pool, "shout") == "quiet"
    assert "printed to stdout" in capfd.readouterr().err


def test_log_that_cannot_be_shortened_does_not_keep_other_logs_from_being_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LOG_BYTES", 1)
    monkeypatch.setattr(pool_module, "LOG_KEPT", 1000)
    monkeypatch.setattr(pool_module, "LOG_SECONDS", 0.01)
    (tmp_path / "user-0.log").mkdir()
    log = tmp_path / "user-1.log"
    with closing(ProcessPool(2, log_dir=tmp_path)):
        log.write_bytes(bytes(100_000))
        assert becomes_true(lambda: log.stat().st_size < 10_000)


# ---- attacks by user code on the process that monitors it


@pytest.mark.parametrize(
    ("name", "failure"), [("stop_everybody", Failure.TIMEOUT), ("kill_my_parent", Failure.KILLED)]
)
def test_code_that_stops_or_kills_its_own_processes_is_killed(
    name: str, failure: Failure, tmp_path: Path
) -> None:
    with closing(ProcessPool(1, log_dir=tmp_path)) as own, pytest.raises(UserCodeError) as raised:
        call(own, name, timeout=2.0)
    assert raised.value.failure is failure


def test_daemon_is_killed_even_if_user_code_kills_its_own_process_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with closing(ProcessPool(1, log_dir=tmp_path)) as own, pytest.raises(UserCodeError):
        call(own, "leave_a_daemon_and_kill_my_group", str(pids))
    assert becomes_true(lambda: not running(int(pids.read_text())))


def test_finished_background_processes_do_not_count_toward_the_limit(
    tmp_path: Path,
) -> None:
    with closing(ProcessPool(1, log_dir=tmp_path)) as own:
        assert call(own, "start_in_background", PROCESSES + 100) == PROCESSES + 100


def test_hanging_call_is_killed_even_if_a_fork_of_the_caller_is_running(tmp_path: Path) -> None:
    """A fork, such as a data loader worker, inherits the pipe whose closing ends the process."""
    with closing(ProcessPool(1, log_dir=tmp_path)) as own:
        assert call(own, "echo")
        if (beside := os.fork()) == 0:
            time.sleep(1000)
        try:
            with pytest.raises(UserCodeError) as raised:
                call(own, "hang", timeout=1.0)
        finally:
            os.kill(beside, signal.SIGKILL)
            os.waitpid(beside, 0)
    assert raised.value.failure is Failure.TIMEOUT
