"""End-to-end tests of the ways to launch a command.

The tests run commands in several processes, as Ray jobs on two nodes, and as documented.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.cluster.placement import Placement, PlacementError
from openrlhf.cluster.ray_cluster import ray_cluster
from openrlhf.termination import STOPPING
from openrlhf.training.devices import free_port
from tests.config.printed import PRINTED
from tests.e2e.commands import Finished, column, finish, numbers, places, run, write_rows
from tests.e2e.nodes import end, environment, start_node, type_in
from tests.e2e.processes import Process, descendants, survivors
from tests.ranks import ROOT
from tests.tiny import character_tokenizer, save_tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}
ROWS, PROMPTS = 128, 16


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create tiny models and datasets in folders named like Hub repositories.

    In the returned workspace, documented commands run unchanged.
    """
    folder = tmp_path_factory.mktemp("launches")
    models, data = folder / "OpenRLHF", folder / "OpenRLHF"
    for name in (
        "meta-llama/Meta-Llama-3-8B",
        "OpenRLHF/Llama-3-8b-sft-mixture",
        "OpenRLHF/Llama-3-8b-rm-700k",
    ):
        save_tiny_model(folder / name, **SIZES, vocab_size=len(character_tokenizer()))
    scores = AutoConfig.from_pretrained(models / "Llama-3-8b-rm-700k", num_labels=1)
    AutoModelForSequenceClassification.from_config(scores).save_pretrained(
        models / "Llama-3-8b-rm-700k"
    )
    draw = random.Random(0)
    words = ["".join(draw.choices("bcdefgh", k=5)) for _ in range(ROWS)]
    rows = {
        data / "sft-mixture": [{"input": word, "output": word[::-1] + "<eos>"} for word in words],
        data / "preference_dataset_mixture2": [
            {"chosen": word + "aa", "rejected": word} for word in words
        ],
        folder / "prompts": [{"input": word} for word in words[:PROMPTS]],
    }
    for path, content in rows.items():
        path.mkdir()
        write_rows(path / "train.jsonl", content)
    return folder


# ---- reward models in several processes


def rm_flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model.model_name_or_path": workspace / "OpenRLHF/Llama-3-8b-sft-mixture",
        "data.dataset": workspace / "OpenRLHF/preference_dataset_mixture2",
        "train.batch_size": 32,
        "train.micro_batch_size": 8,
        "adam.lr": 1e-3,
        "ds.param_dtype": "fp32",
        **places(folder),
        **changes,
    }


@pytest.fixture(scope="module")
def alone(workspace: Path) -> Path:
    """Run `train_rm` as one process."""
    folder = workspace / "alone"
    run("train_rm", rm_flags(workspace, folder))
    return folder


@pytest.mark.verify
@pytest.mark.parametrize(
    ("launcher", "stage"),
    [
        (("deepspeed", "--num_gpus", "2", "--module"), 2),
        (("torchrun", "--nproc_per_node", "2", "-m"), 3),
    ],
    ids=["deepspeed-zero2", "torchrun-zero3"],
)
def test_reward_model_trained_by_two_processes_matches_one_trained_by_a_single_process(
    alone: Path, workspace: Path, launcher: tuple[str, ...], stage: int
) -> None:
    """Losses agree only to 1e-5, because sums are computed in a different order."""
    folder = workspace / launcher[0]
    flags = rm_flags(workspace, folder, **{"ds.zero_stage": stage})
    run("train_rm", flags, launcher=(launcher[0], "--master_port", str(free_port()), *launcher[1:]))
    for name in (
        "train/loss",
        "train/acc",
        "train/lr",
        "eval/eval_loss",
        "eval/reward_mean",
        "eval/reward_std",
    ):
        assert column(folder, name) == pytest.approx(column(alone, name), abs=1e-5), name
        assert column(folder, name), name
    ours, theirs = (
        AutoModelForSequenceClassification.from_pretrained(path / "model")
        for path in (folder, alone)
    )
    tokens = torch.arange(4, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-3, rtol=0)


# ---- offline commands from the documentation


@pytest.fixture(scope="module")
def offline(workspace: Path) -> dict[str, Finished]:
    """Run the offline commands in parallel, because they spend most of their time on imports.

    Each command gets its own port but is otherwise unchanged.
    """
    sft, rm = PRINTED["SFT"], PRINTED["RM"]
    lines = {"SFT": sft.text, "RM": rm.text}
    running = {
        name: type_in(
            line.replace("deepspeed", f"deepspeed --master_port {free_port()}"),
            workspace,
            environment(),
        )
        for name, line in lines.items()
    }
    return {name: finish(process) for name, process in running.items()}


def test_documented_sft_command_detects_its_columns_and_trains(
    offline: dict[str, Finished], workspace: Path
) -> None:
    done = offline["SFT"]
    assert done.status == 0, done.errors
    assert done.errors.count("layout: --data.output_key output. ") == 1
    assert done.errors.count("--actor.model_name_or_path is now --model.model_name_or_path.") == 1
    (folder,) = (workspace / "runs").glob("train_sft-*")
    assert len(column(folder, "train/gpt_loss")) == 2
    AutoModelForCausalLM.from_pretrained(workspace / "ckpt")


def test_documented_rm_command_trains(offline: dict[str, Finished], workspace: Path) -> None:
    done = offline["RM"]
    assert done.status == 0, done.errors
    assert done.errors.count("--actor.model_name_or_path is now --model.model_name_or_path.") == 1
    (folder,) = (workspace / "runs").glob("train_rm-*")
    assert len(column(folder, "train/loss")) == 1
    AutoModelForSequenceClassification.from_pretrained(workspace / "checkpoint/llama3-8b-rm")


# ---- jobs on a Ray cluster


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A two-node Ray cluster: its job address, its shell environment, and its nodes' folders."""

    api: str
    variables: dict[str, str]
    first: Path
    second: Path

    def submitted(self, line: str) -> str:
        """Return a documented command with this cluster's address."""
        return line.replace("http://127.0.0.1:8265", self.api)

    def copy_on(self, node: Path) -> Path:
        """Return the folder with a node's copy of the last job's working directory."""
        copies = (node / "session_latest/runtime_resources/working_dir_files").iterdir()
        return max(
            (path for path in copies if path.is_dir()), key=lambda path: path.stat().st_mtime
        )


@pytest.fixture(scope="module")
def cluster(workspace: Path) -> Iterator[Cluster]:
    """Start a cluster with its own ports, folders and token.

    The first node only accepts jobs. All processes started by runs are placed on the second node.
    """
    # Ray creates its sockets in `home`, and socket paths must be short.
    home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    port, api, client = (free_port() for _ in range(3))
    variables = environment(HOME=str(home), RAY_AUTH_MODE="token")
    common = "--block --min-worker-port 0 --max-worker-port 0 --dashboard-agent-listen-port 0"
    head = (
        f"--head --port {port} --dashboard-port {api} --ray-client-server-port {client} "
        "--num-cpus 0"
    )
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        generated = finish(type_in("ray get-auth-token --generate", workspace, variables))
        assert generated.status == 0, generated.errors
        for name, flags in (
            ("first", head),
            ("second", f"--address 127.0.0.1:{port} --num-cpus 1"),
        ):
            nodes.append(
                start_node(
                    f"{flags} {common} --temp-dir {home / name}",
                    workspace,
                    variables,
                    home / f"{name}.log",
                )
            )
        yield Cluster(
            api=f"http://127.0.0.1:{api}",
            variables=variables,
            first=home / "first",
            second=home / "second",
        )
    finally:
        for node in reversed(nodes):
            end(node)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, workspace: Path) -> dict[str, Finished]:
    """Submit the documented jobs in parallel, with the documented working directory."""
    ppo = PRINTED["PPO as a job, from this folder"]
    lines = {"as printed": ppo.text, "complete": f"{ppo.text} {ppo.missing}"}
    running = {
        name: type_in(cluster.submitted(line), workspace, cluster.variables)
        for name, line in lines.items()
    }
    return {name: finish(process) for name, process in running.items()}


def test_job_with_a_missing_flag_fails_with_the_error_message(jobs: dict[str, Finished]) -> None:
    done = jobs["as printed"]
    assert done.status == 1  # the exit status of `ray job submit`
    shown = done.printed + done.errors
    assert "failed with exit code 2" in shown
    assert re.search("^error: --data.prompt_dataset is required.", shown, re.MULTILINE)
    assert "Traceback" not in shown


@pytest.mark.verify
def test_documented_asynchronous_job_trains(cluster: Cluster, workspace: Path) -> None:
    printed = PRINTED["asynchronous PPO"]
    line = printed.text.replace("'<model>'", "OpenRLHF/Llama-3-8b-sft-mixture")
    line = line.replace("'<rm>'", "OpenRLHF/Llama-3-8b-rm-700k")
    line = f"{line} {printed.missing} --run.dir {workspace}/ahead"
    line = f"{line} --ckpt.output_dir {workspace}/ahead-model"
    done = finish(type_in(cluster.submitted(line), workspace, cluster.variables))
    assert done.status == 0, done.printed + done.errors
    (row,) = numbers(workspace / "ahead")
    assert (row["rollout/num_samples"], row["rollout/lag_max"]) == (PROMPTS, 0.0)
    notice = "Samples may come from older weights (in asynchronous runs, --train.max_staleness 2)"
    assert notice in done.printed


def test_full_job_trains_on_all_nodes_and_shows_its_progress(
    jobs: dict[str, Finished], cluster: Cluster
) -> None:
    done = jobs["complete"]
    assert done.status == 0, done.printed + done.errors
    assert re.search(r"^step 1/1 · reward", done.printed, re.MULTILINE)
    (folder,) = (cluster.copy_on(cluster.first) / "runs").glob("train_ppo_ray-*")
    (row,) = numbers(folder)
    assert row["rollout/num_samples"] == PROMPTS
    assert all(math.isfinite(value) for value in row.values())
    assert row["train/logprob_gap_mean"] < 0.01  # bfloat16
    copies = [
        cluster.copy_on(node) / "checkpoint/llama3-8b-ppo"
        for node in (cluster.first, cluster.second)
    ]
    (exported,) = (path for path in copies if path.exists())
    AutoModelForCausalLM.from_pretrained(exported)


def test_job_gets_a_notice_that_relative_folders_are_in_the_working_directory_copy(
    jobs: dict[str, Finished], cluster: Cluster
) -> None:
    (notice,) = re.findall(
        r"^\[notice\] (.*: relative to .*)", jobs["complete"].printed, re.MULTILINE
    )
    for flag in ("--ckpt.output_dir ./checkpoint/llama3-8b-ppo", "--run.dir"):
        assert flag in notice
    assert "--ckpt.path" not in notice  # the job writes no checkpoints
    assert cluster.copy_on(cluster.first).name in notice


def of_runs() -> list[Process]:
    """Return the processes that have been started on the cluster by runs."""
    every = descendants(os.getpid())
    return [
        process
        for process in every
        if process.command.startswith(("ray::WorkerHost", "ray::RolloutEngine"))
    ]


@pytest.mark.usefixtures("jobs")
def test_finished_job_leaves_no_processes_on_the_cluster() -> None:
    assert survivors(of_runs(), within=30) == []


@pytest.mark.verify
def test_job_without_a_working_directory_runs_in_the_directory_where_ray_was_started(
    cluster: Cluster, workspace: Path
) -> None:
    ppo = PRINTED["PPO as a job"]
    done = finish(
        type_in(cluster.submitted(f"{ppo.text} {ppo.missing}"), workspace, cluster.variables)
    )
    assert done.status == 0, done.printed + done.errors
    (folder,) = (workspace / "runs").glob("train_ppo_ray-*")
    assert len(numbers(folder)) == 1
    assert "[notice] --ckpt.output_dir" not in done.printed


@pytest.mark.verify
def test_stopped_job_ends_with_all_its_processes(cluster: Cluster, workspace: Path) -> None:
    ppo = PRINTED["PPO as a job, from this folder"]
    line = f"{ppo.text} {ppo.missing} --train.num_episodes 10000".replace(
        "submit", "submit --submission-id endless"
    )
    shown = type_in(
        cluster.submitted(line), workspace, cluster.variables | {"PYTHONUNBUFFERED": "1"}
    )
    assert shown.stdout is not None
    next(text for text in shown.stdout if re.match(r"step +1/", text))
    started = of_runs()
    assert len(started) == 5  # policy, reference, critic, reward model and engine
    stop = f"ray job stop --address={cluster.api} endless"
    stopped = finish(type_in(stop, workspace, cluster.variables))
    assert stopped.status == 0, stopped.errors
    assert survivors(started, within=30) == []
    finish(shown)


# ---- joining a running Ray cluster

NOTHING = Placement(groups=(), on_gpus=False)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "here"])
def test_unreachable_ray_address_is_reported_immediately(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(
            PlacementError, match=rf"No Ray .*answers at RAY_ADDRESS {address}.*unset RAY_ADDRESS"
        ),
        ray_cluster(NOTHING, on_loss=print),
    ):
        pass


def start_program(code: str) -> subprocess.Popen[str]:
    """Start Python code in its own session, with pipes for its output."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


STARTS_RAY = """
from openrlhf.cluster.ray_cluster import ray_cluster
from openrlhf.cluster.placement import Placement

with ray_cluster(Placement(groups=(), on_gpus=False), on_loss=print):
    print("up", flush=True)
"""


@pytest.mark.parametrize(
    ("reached", "number", "end"),
    [
        pytest.param("gcs_server", signal.SIGTERM, (143, "terminated"), marks=pytest.mark.verify),
        pytest.param("gcs_server", signal.SIGINT, (130, "interrupted"), marks=pytest.mark.verify),
        ("/raylet/raylet", signal.SIGTERM, (143, "terminated")),
        pytest.param(
            "/raylet/raylet", signal.SIGINT, (130, "interrupted"), marks=pytest.mark.verify
        ),
    ],
)
def test_process_terminated_while_ray_starts_leaves_no_processes(
    reached: str, number: signal.Signals, end: tuple[int, str]
) -> None:
    process = start_program(STARTS_RAY)
    started: list[Process] = []
    while not any(reached in each.command for each in started):
        assert process.poll() is None
        time.sleep(0.005)
        started = descendants(process.pid)
    os.killpg(process.pid, number)
    done = finish(process)
    assert (done.status, done.errors.split()[-1]) == end, done.errors
    assert done.printed == "" and "Traceback" not in done.errors
    assert survivors(started, within=30) == []


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["process", "group"])
def test_sigterm_to_the_process_group_ends_a_run_cleanly(send: Callable[[int, int], None]) -> None:
    """`timeout` and schedulers send SIGTERM to the whole process group.

    Ray must survive the signal, because the run needs Ray to shut down cleanly.
    """
    program = (
        "import ray, time\n"
        "from openrlhf.cluster.ray_cluster import ray_cluster\n"
        "from openrlhf.cluster.placement import Placement\n"
        "try:\n"
        "    with ray_cluster(Placement(groups=(), on_gpus=False), on_loss=print):\n"
        "        try:\n"
        "            print('up', flush=True)\n"
        "            time.sleep(600)\n"
        "        finally:\n"
        "            print(len(ray.nodes()), 'node', flush=True)\n"
        "finally:\n"
        "    print('in order', flush=True)\n"
    )
    process = start_program(program)
    try:
        assert process.stdout and process.stdout.readline() == "up\n"
        send(process.pid, signal.SIGTERM)
        said, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    ending = f"{STOPPING.decode()}\nterminated".strip()
    assert (process.returncode, said.strip(), errors.strip()) == (143, "1 node\nin order", ending)


HOLDER = (
    "import ray, time; ray.init(); hold = ray.util.placement_group([dict(GPU=2)]); "
    'assert hold.wait(60); print("held", flush=True); time.sleep(600)'
)


@pytest.fixture(scope="module")
def gpu_ray(workspace: Path) -> Iterator[dict[str, str]]:
    """Start a Ray cluster that reports two GPUs, and return a shell environment that finds it.

    The cluster's address is recorded in the file that `ray start` writes.
    """
    home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    variables = environment(HOME=str(home), RAY_TMPDIR=str(home), RAY_AUTH_MODE="disabled")
    ports = (
        f"--port {free_port()} --min-worker-port 0 --max-worker-port 0 "
        "--dashboard-agent-listen-port 0"
    )
    flags = f"--head --block --num-gpus 2 --num-cpus 2 --include-dashboard false {ports}"
    node = start_node(
        f"{flags} --ray-client-server-port {free_port()}", workspace, variables, home / "head.log"
    )
    try:
        yield variables
    finally:
        end(node)
        shutil.rmtree(home, ignore_errors=True)


def of_default_size(workspace: Path, variables: dict[str, str], *more: str) -> Finished:
    """Run `train_ppo_ray` without device counts on a machine without GPUs."""
    line = (
        f"{sys.executable} -m openrlhf.cli.train_ppo_ray --reward.verifier format "
        "--vllm.num_engines 1 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture "
        f"--data.prompt_dataset prompts --algo.advantage.estimator reinforce {' '.join(more)}"
    )
    return finish(type_in(line, workspace, variables | {"PYTHONPATH": str(ROOT)}))


def test_device_count_is_taken_from_the_running_ray_cluster_instead_of_the_machine(
    workspace: Path, gpu_ray: dict[str, str]
) -> None:
    note = (Path(gpu_ray["RAY_TMPDIR"]) / "ray/ray_current_cluster").read_text()
    for variables in (
        gpu_ray,
        environment(HOME=gpu_ray["HOME"], RAY_AUTH_MODE="disabled", RAY_ADDRESS=note),
    ):
        done = of_default_size(workspace, variables, "--dry_run")
        assert done.status == 2, done.printed + done.errors
        needed = (
            "the run needs 17 GPUs (1 x 8 for actor + 1 x 8 for ref + 1 for vllm; machines x "
            "GPUs), and the cluster has 2"
        )
        assert needed in done.errors
        assert "There is no GPU" not in done.errors


def test_dry_run_reserves_no_resources_of_the_joined_ray_cluster(
    workspace: Path, gpu_ray: dict[str, str]
) -> None:
    """A dry run that needs both GPUs succeeds while another process has reserved both GPUs."""
    holder = type_in(f"{sys.executable} -c '{HOLDER}'", workspace, gpu_ray)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        sizes = [f"--{role}.num_gpus_per_node 1" for role in ("actor", "ref")]
        done = of_default_size(workspace, gpu_ray, "--dry_run --train.colocate_actor_ref", *sizes)
        assert done.status == 0, done.errors
        assert "actor, ref: 1 process(es): 1 on" in done.printed
    finally:
        holder.kill()
        holder.communicate()


def test_run_that_needs_more_gpus_than_the_ray_cluster_has_is_rejected(
    workspace: Path, gpu_ray: dict[str, str]
) -> None:
    done = of_default_size(workspace, gpu_ray)
    assert done.status == 2
    assert (
        "error: the run needs 17 GPUs (1 x 8 for actor + 1 x 8 for ref + 1 for vllm" in done.errors
    )
    assert "and the cluster has 2 (1 x 2)." in done.errors


@pytest.mark.parametrize("address", ["local", None])
def test_device_count_is_taken_from_the_machine_if_no_ray_cluster_is_running(
    workspace: Path, tmp_path: Path, address: str | None
) -> None:
    named = {"RAY_ADDRESS": address} if address else {"RAY_TMPDIR": str(tmp_path)}
    done = of_default_size(workspace, environment(**named), "--dry_run")
    assert done.status == 0, done.errors
    assert "actor: 1 process(es): 1 on this machine" in done.printed
    assert "There is no GPU, so " in done.errors


def test_stale_address_file_of_a_stopped_ray_cluster_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted `ray start --block` or a power failure can leave a stale address file."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        note = Path(folder) / "ray/ray_current_cluster"
        note.parent.mkdir()
        note.write_text(f"127.0.0.1:{free_port()}")
        with ray_cluster(NOTHING, on_loss=print):
            assert ray.get_runtime_context().gcs_address != note.read_text()
    assert not ray.is_initialized()
