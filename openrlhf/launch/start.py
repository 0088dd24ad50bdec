"""Starts an RL run.

Libraries are imported while Ray and the processes start; doing this sequentially would take ten
seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from openrlhf import termination
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint
from openrlhf.cluster.placement import HostGroup, Placement, engine_group
from openrlhf.cluster.ray_cluster import expected_machines, ray_cluster
from openrlhf.cluster.ray_watch import RayProcess
from openrlhf.cluster.worker_group import WorkerError
from openrlhf.config.flags import amend
from openrlhf.config.groups import role_groups
from openrlhf.config.machine import quick_imports
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.ray_loss import (
    CONTINUES_ITSELF,
    RESTARTS,
    RayLoss,
    can_replace_process,
    inherited,
)
from openrlhf.reporting import alert, notice
from openrlhf.rollout.engine_settings import engine_device

if TYPE_CHECKING:
    from openrlhf.launch.processes import Processes
    from openrlhf.launch.run import Run

    Prepare = Callable[[PPOConfig, Processes], Run | None]

LOAD_ENABLE = "ckpt.load_enable"


def run_ppo(config: PPOConfig) -> None:
    """Run PPO training on a running or new Ray cluster. A dry run does not start Ray."""
    restarts = Restarts(config)
    config = restarts.config
    plan = plan_placement(config, engine_device())
    if config.dry_run:
        plan.check(expected_machines(plan.on_gpus, config.placement.cluster))
    loss = RayLoss(lambda: how_to_continue(config), restarts.begin_restart)
    with ThreadPoolExecutor(1) as thread:
        # This order lets the processes start while the preparation code is imported.
        importing_processes = thread.submit(import_processes)
        importing_prepare = thread.submit(import_preparation)
        with nullcontext() if config.dry_run else ray_cluster(plan, loss):
            while True:
                try:
                    attempt_run(restarts.config, plan, loss, importing_processes, importing_prepare)
                    return
                except WorkerError as error:
                    if termination.asked():
                        raise
                    if not restarts.left:
                        raise WorkerError(f"{error} {how_to_continue(config)}") from error
                    restarts.count_restart(error)


def attempt_run(
    config: PPOConfig,
    plan: Placement,
    loss: RayLoss,
    importing_processes: Future[type[Processes]],
    importing_prepare: Future[Prepare],
) -> None:
    """Prepare a run, train on its episodes or only generate them, and stop its processes.

    Raises WorkerError.
    """
    processes_class = importing_processes.result()
    with closing(processes_class(plan, config.ds)) as processes:
        # While reading data, do not hold GPUs that other jobs may need.
        if not config.dry_run and not plan.on_gpus:
            processes.start()
        prepare = importing_prepare.result()
        run = prepare(config, processes)
        if run is None:
            return
        with loss.closing(run.recorder.close), run.started() as models:
            run.make_loop(models).fit()
            loss.finished = True


def import_processes() -> type[Processes]:
    """Import Ray and return the `Processes` class."""
    with quick_imports():
        from openrlhf.launch.processes import Processes

    return Processes


def import_preparation() -> Prepare:
    """Import Transformers and return `prepare`, which checks and loads everything a run needs."""
    with quick_imports():
        from openrlhf.launch.reinforcement import prepare

    return prepare


class Restarts:
    """Restart count of a run (--train.max_restarts), including the replaced processes' restarts.

    `config.given` contains --ckpt.load_enable only if the user passed it. Without
    --ckpt.load_enable, a restarted run resumes only its own checkpoints, not those of another run
    that shares --ckpt.path.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.most = config.train.max_restarts
        self.done = inherited(RESTARTS)
        self.config = config
        # True if a restart, not the user, added --ckpt.load_enable.
        self.continues_itself = bool(inherited(CONTINUES_ITSELF))
        if self.continues_itself:
            by_user = dict(config.given)
            by_user.pop(LOAD_ENABLE, None)
            self.config = amend(config, {"given": by_user})

    @property
    def left(self) -> bool:
        """True if another restart is allowed."""
        return self.done < self.most

    def count_restart(self, cause: object) -> None:
        """Count and announce a restart, and make it resume the newest checkpoint."""
        self.done += 1
        self.config = amend(self.config, {LOAD_ENABLE: True})
        alert(
            f"{cause}\nRestart {self.done} of {self.most} (--train.max_restarts), from the run's "
            "newest checkpoint if there is one."
        )

    def begin_restart(self, lost: RayProcess) -> list[str] | None:
        """Count and announce a restart of this process's command.

        Returns the flags to append to the command, or None if the command must exit instead.
        """
        if not self.left:
            return None
        if obstacle := obstacle_to_restart(lost):
            notice(f"No restart (--train.max_restarts {self.most}): {obstacle}.")
            return None
        flags: list[str] = []
        given = self.config.given
        if "run.dir" not in given:
            flags += ["--run.dir", os.path.abspath(self.config.run.dir)]
        loads_already = given.get(LOAD_ENABLE) or self.continues_itself
        if not loads_already and newest_checkpoint(self.config):
            flags.append(f"--{LOAD_ENABLE}")
            self.continues_itself = True
        self.count_restart(lost.death)
        os.environ[RESTARTS] = str(self.done)
        os.environ[CONTINUES_ITSELF] = str(int(self.continues_itself))
        return flags


def obstacle_to_restart(lost: RayProcess) -> str:
    """Return why this process cannot restart its command with a new Ray cluster, or ""."""
    if not lost.own:
        return "this Ray cluster was not started by the run"
    if not can_replace_process():
        return f"the program {sys.argv[0]} is not an openrlhf command"
    return ""


def newest_checkpoint(config: PPOConfig) -> Checkpoint | None:
    """Return the newest checkpoint that this run has written or may resume."""
    newest = None
    for checkpoint in CheckpointManager(config.ckpt).checkpoints():
        if checkpoint.parts and checkpoint.may_be_resumed_by(config):
            newest = checkpoint
    return newest


def how_to_continue(config: PPOConfig) -> str:
    """Return a sentence that names the newest checkpoint and the command that resumes it."""
    newest = newest_checkpoint(config)
    if newest is None:
        return (
            "The run has no checkpoint (--ckpt.save_steps). Running the same command again starts "
            "from the beginning."
        )
    return (
        f"Step {newest.state.step} is saved. To resume from this step, run the same command with "
        "--ckpt.load_enable, or set --train.max_restarts to resume automatically."
    )


def plan_placement(config: PPOConfig, kind: str) -> Placement:
    """Return a run's host groups: its roles, grouped by the devices that they share."""
    groups: list[HostGroup] = []
    for sharing in role_groups(config):
        group = HostGroup(
            name="+".join(sharing.roles),
            roles=sharing.roles,
            processes=sharing.processes,
            per_machine=sharing.size.num_gpus_per_node,
            wants=config.placement.wants(sharing.roles),
        )
        groups.append(group)
    if not config.rollout.replay_dir:
        shares = None
        if config.hybrid and not config.rollout.only:
            shares = groups[0].name
        wants = config.placement.wants(["vllm"])
        groups.append(engine_group(config.vllm, "vllm", shares=shares, wants=wants))
    return Placement(groups=tuple(groups), on_gpus=kind == "cuda")
