"""Measures the peak memory of one role at each instant, relative to the idle process.

Every rank is a separate process, forked from a process that has imported the libraries. Before its
memory is first read, a rank joins the process group and runs the complete measurement with a model
of 20,000 parameters, so that code, thread pools and first-call caches are part of the idle process.
Then the model to measure is loaded and used through the same classes as in a run.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.config.algorithm import AlgoConfig, KLConfig
from openrlhf.config.flags import amend
from openrlhf.config.learning import (
    ActorConfig,
    CriticConfig,
    RLDeepSpeedConfig,
    RLFlags,
    RLLoraConfig,
    RLTrainConfig,
)
from openrlhf.config.rollout import RewardConfig, RolloutConfig, VLLMConfig
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig
from openrlhf.core.batches import Experience, offsets_of
from openrlhf.data.feedback import LabelledRow, PairRow
from openrlhf.data.sft import SFTRow
from openrlhf.launch.offline import load_models
from openrlhf.models.loading import LoadSpec
from openrlhf.training.engine import TrainEngine
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.weights.receiver import Delivery, LoadReport, WeightReceiver
from openrlhf.weights.transport import WeightGroup
from openrlhf.workers.base import MicroBatchLimits, RoleSettings, Update
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker, RewardModelSettings, RewardWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker
from tests.ranks import fork_ranks, rank_environment, unused_port
from tests.trainers.offline_job import task_of

STEPS = 2  # optimizer steps; the first one also creates state that later steps keep
PROMPT_SHARE = 4  # a quarter of each sequence is the prompt
SCORED = "-scored"  # suffix of folders that contain models with a scalar head
SCALAR = ("reward", "rm")  # roles that load models with a scalar head
FORK: Any = multiprocessing.get_context("fork")
OFFLINE = ("sft", "dpo", "rm", "kto", "kd")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A role with its model, in a layout of ranks."""

    model: str  # name of a folder in the models folder
    role: str  # policy, critic, reference, reward, or the name of an offline task
    zero: int = 0
    ranks: int = 1
    tp: int = 1
    sp: int = 1
    dtype: str = "fp32"
    lora: int = 0  # rank of the adapters
    checkpointing: bool = False
    packed: bool = False
    adam_offload: bool = False
    ema: bool = False
    rows: int = 2  # sequences (for preference tasks: pairs) in a micro-batch
    length: int = 64  # tokens in a sequence
    micro_batches: int = 1  # micro-batches of each rank in an optimizer step

    @property
    def name(self) -> str:
        """The case as one line of text, without default values."""
        words = [self.model, self.role]
        plain = Case(model=self.model, role=self.role)
        for setting, value in vars(self).items():
            if value == getattr(plain, setting):
                continue
            if value is True:
                words.append(setting)
            elif isinstance(value, str):
                words.append(value)
            else:
                words.append(f"{setting} {value}")
        return ", ".join(words)


# ---- memory of a process

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of mallopt in glibc's malloc.h
MAPPED_BYTES = 1 << 16  # blocks above this size get their own memory mapping
_LIBC = ctypes.CDLL(None)
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def memory() -> dict[str, int]:
    """Return the memory fields in this process's /proc status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return {name: int(kib) * 1024 for name, kib in _FIELD.findall(text)}


def return_freed_memory() -> None:
    """Make glibc return freed tensors to the system immediately.

    By default, glibc keeps freed blocks of up to 32 MiB, so resident memory depends on the history
    of allocations. With a fixed limit, resident memory equals the memory in use.
    """
    _LIBC.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    _LIBC.mallopt(M_TRIM_THRESHOLD, MAPPED_BYTES)


def collect() -> None:
    """Free unreachable objects, and return free heap memory to the system."""
    gc.collect()
    _LIBC.malloc_trim(0)


@dataclass
class Meter:
    """Measures the peak resident memory at each instant, relative to the idle process, in bytes."""

    idle: dict[str, int] = field(default_factory=memory)
    peaks: dict[str, int] = field(default_factory=dict)
    # Memory at the end of each instant: anonymous, and file-backed or shared.
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    _instant: str | None = None

    def begin(self, instant: str) -> None:
        """End the current instant, and begin a new or a repeated instant."""
        self.end()
        _LIBC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        self._instant = instant

    def end(self) -> None:
        """Record the current instant's peak."""
        if self._instant is None:
            return
        now = memory()
        above = now["VmHWM"] - self.idle["VmRSS"]
        self.peaks[self._instant] = max(self.peaks.get(self._instant, 0), above)
        anonymous = now["RssAnon"] - self.idle["RssAnon"]
        self.held[self._instant] = (anonymous, now["VmRSS"] - self.idle["VmRSS"] - anonymous)
        self._instant = None


class GpuMeter(Meter):
    """Measures the memory that PyTorch's allocator has handed out on this process's GPU.

    `held` contains the peak of the allocator's reserved memory, and all memory in use on the GPU at
    the end of the instant.
    """

    def __init__(self) -> None:
        super().__init__(idle={"allocated": torch.cuda.memory_allocated()})

    def begin(self, instant: str) -> None:
        self.end()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._instant = instant

    def end(self) -> None:
        if self._instant is None:
            return
        above = torch.cuda.max_memory_allocated() - self.idle["allocated"]
        self.peaks[self._instant] = max(self.peaks.get(self._instant, 0), above)
        free, total = torch.cuda.mem_get_info()
        self.held[self._instant] = (torch.cuda.max_memory_reserved(), total - free)
        self._instant = None


@contextmanager
def instants_of(engine: TrainEngine, meter: Meter, *, scores: bool = False) -> Iterator[None]:
    """Record the instants of `TrainEngine.optimize` until the block exits.

    `scores` is true if a model runs in the first pass over the window.
    """
    backward, step, first_pass = engine.deepspeed.backward, engine._step, engine._first_pass

    def begin_forward(*_: Any) -> None:
        if torch.is_grad_enabled():
            meter.begin("forward")

    def measured_first_pass(*arguments: Any) -> Any:
        if scores:
            meter.begin("score")
        result = first_pass(*arguments)
        meter.end()
        return result

    def measured_backward(loss: torch.Tensor) -> None:
        meter.begin("backward")
        backward(loss)
        meter.end()

    def measured_step(*arguments: Any) -> Any:
        meter.begin("step")
        result = step(*arguments)
        meter.end()
        return result

    hook = engine.deepspeed.register_forward_pre_hook(begin_forward)
    with (
        patch.object(engine.deepspeed, "backward", measured_backward),
        patch.object(engine, "_step", measured_step),
        patch.object(engine, "_first_pass", measured_first_pass),
    ):
        yield
    hook.remove()


# ---- data


def lengths_of(case: Case, rows: int) -> list[int]:
    """Return the lengths of `rows` sequences.

    Every second sequence is one token shorter, so that a padded batch needs an attention mask.
    """
    return [case.length - row % 2 for row in range(rows)]


def experience_of(case: Case, rows: int) -> Experience:
    """Return `rows` episodes with random tokens and random numbers."""
    draw = torch.Generator().manual_seed(0)
    lengths = lengths_of(case, rows)
    prompt = case.length // PROMPT_SHARE
    masks = [torch.arange(length) >= prompt for length in lengths]
    count = sum(lengths)
    return Experience(
        tokens=torch.randint(4, 60, (count,), generator=draw),
        offsets=offsets_of(lengths),
        action_mask=torch.cat(masks),
        rollout_logprobs=torch.full((count,), -4.0),
        group_ids=torch.arange(rows),
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.randn(count, generator=draw),
        returns=torch.randn(count, generator=draw),
        values=torch.randn(count, generator=draw),
        old_logprobs=torch.full((count,), -4.0),
        ref_logprobs=torch.full((count,), -4.0),
    )


def task_rows(case: Case, rows: int) -> list[Any]:
    """Return `rows` dataset rows for an offline task."""
    prompt = case.length // PROMPT_SHARE
    made: list[Any] = []
    draw = torch.Generator().manual_seed(0)
    for number, length in enumerate(lengths_of(case, rows)):
        mask = [place >= prompt for place in range(length)]
        chosen, rejected = torch.randint(4, 60, (2, length), generator=draw).tolist()
        if case.role in ("sft", "kd"):
            made.append(SFTRow(tokens=chosen, loss_mask=mask))
        elif case.role == "kto":
            made.append(LabelledRow(tokens=chosen, loss_mask=mask, desirable=number % 2 > 0))
        else:
            # gives the two answers of a pair different lengths
            made.append(PairRow(chosen=chosen, rejected=rejected[:-1], prompt_length=prompt))
    return made


# ---- roles


def deepspeed_flags(case: Case) -> dict[str, Any]:
    """Return the settings of `--ds`."""
    return {
        "zero_stage": case.zero,
        "param_dtype": case.dtype,
        "packing_samples": case.packed,
        "attn_implementation": "sdpa",
        "adam_offload": case.adam_offload,
        "ring_attn_size": case.sp,
        "tensor_parallel_size": case.tp,
    }


def reinforcement_settings(case: Case, path: str) -> RoleSettings:
    """Return the settings of the policy, critic or reference."""
    config = RLFlags(
        actor=ActorConfig(
            model_name_or_path=path,
            gradient_checkpointing_enable=case.checkpointing,
            eps_clip_low_high=(0.2, 0.2),
        ),
        critic=CriticConfig(model_name_or_path=path),
        algo=AlgoConfig(kl=KLConfig(estimator="k3", use_loss=True)),
        rollout=RolloutConfig(temperature=1.0, micro_batch_size=case.rows),
        reward=RewardConfig(),
        train=RLTrainConfig(micro_batch_size=case.rows, enable_ema=case.ema),
        ds=RLDeepSpeedConfig(
            **deepspeed_flags(case), lora=RLLoraConfig(rank=case.lora, alpha=2 * case.lora)
        ),
        vllm=VLLMConfig(dtype=case.dtype),
    )
    load = LoadSpec(path=path, ds=config.ds, max_len=case.length)
    if case.role in ("policy", "critic"):
        load = load.trained(config.actor, config.ds.lora, 0)
    return RoleSettings(config=config, load=load, total_steps=STEPS)


def measure_reinforcement(
    case: Case,
    path: str,
    strategy: Strategy,
    meter: Meter,
    publish: Callable[[PolicyWorker, Meter], None],
) -> None:
    """Measure the policy, critic, reference or reward model of a PPO step."""
    settings = reinforcement_settings(case, path)
    experience = experience_of(case, case.rows * case.micro_batches * STEPS)
    steps = torch.arange(len(experience.offsets) - 1).view(STEPS, -1).tolist()
    meter.begin("load")
    match case.role:
        case "policy":
            policy = PolicyWorker(strategy, settings)
            meter.begin("score")
            policy.logprobs(experience.targets())
            meter.end()
            with instants_of(policy.engine, meter):
                job = PolicyUpdate(experience=experience, steps=steps, kl_coef=0.1)
                policy.update(job)
            publish(policy, meter)
            meter.begin("score")
            policy.logprobs(experience.targets())
        case "critic":
            critic = CriticWorker(strategy, settings)
            meter.begin("score")
            critic.values(experience)
            meter.end()
            with instants_of(critic.engine, meter):
                critic.update(Update(experience=experience, steps=steps))
            meter.begin("score")
            critic.values(experience)
        case "reference":
            reference = ReferenceWorker(strategy, settings)
            meter.begin("score")
            reference.logprobs(experience.targets())
        case _:
            judge = RewardWorker(
                strategy,
                RewardModelSettings(
                    models=(settings.load,),
                    process_model=None,
                    limits=MicroBatchLimits(size=case.rows, packed=case.packed),
                    head_prefix="score",
                    reward=settings.config.reward,
                ),
            )
            meter.begin("score")
            judge.rewards(experience)
    meter.end()


def measure_offline(case: Case, path: str, strategy: Strategy, meter: Meter) -> None:
    """Measure the trained model of an offline task, and the frozen model if the task has one."""
    lora = LoraConfig(rank=case.lora, alpha=2 * case.lora)
    ds = DeepSpeedConfig(**deepspeed_flags(case), lora=lora)
    task = task_of(case.role, path, path, ds)
    flags = {
        "adam.lr": 1e-6,
        "adam.eps": 1e-8,
        "data.max_len": case.length,
        "train.enable_ema": case.ema,
        "model.gradient_checkpointing_enable": case.checkpointing,
    }
    task.config = amend(task.config, flags)
    limits = MicroBatchLimits(size=case.rows, packed=case.packed)
    rows = task_rows(case, case.rows * case.micro_batches)
    meter.begin("load")
    engine = load_models(task, strategy, STEPS, CheckpointManager(task.config.ckpt))
    meter.end()
    for _ in range(STEPS):
        own = task.of_window(rows, strategy)
        micro_batches = task.micro_batches(task.collate(own), limits)
        with instants_of(engine, meter, scores=task.has_first_pass):
            engine.optimize(
                micro_batches,
                counts=task.counts,
                loss=lambda micro, totals: task.loss(engine, micro.to(strategy.device), totals),
                before=lambda micro: task.before(engine, micro.to(strategy.device)),
            )
    meter.end()


# ---- publication


@dataclass(frozen=True, kw_only=True)
class Publications:
    """Publishes weights to a process that receives and discards them."""

    ports: tuple[int, ...]  # one for each publication
    manifests: Any  # a queue that tells the receiver what to expect

    @classmethod
    def of(cls, count: int) -> Publications:
        """Return `count` publications."""
        ports = tuple(unused_port() for _ in range(count))
        return cls(ports=ports, manifests=FORK.SimpleQueue())

    def _group(self, number: int) -> WeightGroup:
        port = self.ports[number]
        return WeightGroup(
            host="127.0.0.1", port=port, world_size=2, transport="gloo", name=f"group-{number}"
        )

    def send(self, number: int, policy: PolicyWorker, meter: Meter) -> None:
        """Publish the policy's weights. All ranks of the policy must call this method."""
        manifest = policy.weight_manifest(number)
        if policy.strategy.is_main:
            self.manifests.put(manifest)
        policy.join_weight_group(self._group(number))
        meter.begin("publish")
        policy.send_weights(manifest)
        meter.end()
        policy.sender.leave()

    def receive(self) -> None:
        """Receive all publications, one after another."""

        def discard(_: Delivery) -> LoadReport:
            return LoadReport(unwritten=(), stale=())

        for number in range(len(self.ports)):
            manifest = self.manifests.get()
            receiver = WeightReceiver()
            receiver.join(self._group(number), 1)
            receiver.receive(manifest, torch.device("cpu"), discard)
            receiver.leave()


# ---- processes


def measure_rank(case: Case, models: Path, publications: Publications, results: Any) -> None:
    """Measure a case as one of its ranks. Rank 0 puts the measurements of all ranks into `results`.

    A first measurement with a tiny model is discarded.
    """
    torch.set_num_threads(1)
    return_freed_memory()
    ds = DeepSpeedConfig(**deepspeed_flags(case))
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=case.ranks), seed=0)
    meter = Meter()
    for number, model in enumerate(("tiny", case.model)):
        path = str(models / model)
        if case.role in SCALAR:
            path += SCORED
        collect()
        strategy.barrier()
        meter = Meter()
        if case.role in OFFLINE:
            measure_offline(case, path, strategy, meter)
        else:
            publish = partial(publications.send, number)
            measure_reinforcement(case, path, strategy, meter, publish)
    numbers = strategy.gather_ranks({"peaks": meter.peaks, "held": meter.held})
    if strategy.is_main:
        results.put({"case": vars(case), "ranks": numbers})


def measure_on_gpu(case: Case, models: Path) -> dict[str, Any]:
    """Measure a case with one rank on this machine's first GPU, in this process.

    Publications are not measured.
    """
    os.environ |= rank_environment(0, 1, unused_port())
    ds = DeepSpeedConfig(**deepspeed_flags(case))
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=1), seed=0)
    path = str(models / case.model) + (SCORED if case.role in SCALAR else "")
    gc.collect()
    torch.cuda.empty_cache()
    meter = GpuMeter()
    if case.role in OFFLINE:
        measure_offline(case, path, strategy, meter)
    else:
        measure_reinforcement(case, path, strategy, meter, publish=lambda *_: None)
    return {"case": vars(case), "ranks": [{"peaks": meter.peaks, "held": meter.held}]}


def measure_case(case: Case, models: Path) -> dict[str, Any] | None:
    """Measure a case in new processes. Returns None if a process failed."""
    publications = Publications.of(2)
    results = FORK.SimpleQueue()
    receiver = FORK.Process(target=publications.receive)
    if case.role == "policy":
        receiver.start()
    fork_ranks(case.ranks, measure_rank, case, models, publications, results)
    if case.role == "policy":
        receiver.kill()
        receiver.join()
    if results.empty():
        return None
    return results.get()
