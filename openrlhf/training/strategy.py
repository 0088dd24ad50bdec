"""This process among its peers: device, ranks, reductions, and frozen models."""

from __future__ import annotations

import atexit
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import enable_full_determinism, set_seed

from openrlhf import rendezvous
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.training import devices, ds_config
from openrlhf.training.layout import RankLayout
from openrlhf.training.quiet_deepspeed import HfDeepSpeedConfig, deepspeed

COLLECTIVE_TIMEOUT = timedelta(hours=1)


class Strategy:
    """This process among its peers."""

    def __init__(
        self,
        engine: DeepSpeedConfig,
        layout: RankLayout,
        *,
        seed: int,
        full_determinism: bool = False,
    ) -> None:
        self.config = engine
        self.kind = devices.device_kind()
        devices.complete_launcher_environment()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        if self.kind == "cuda":
            torch.cuda.set_device(self.local_rank)
        self.device = (
            torch.device("cuda", self.local_rank) if self.kind == "cuda" else torch.device("cpu")
        )
        if not dist.is_initialized():
            backend = "nccl" if self.kind == "cuda" else "gloo"
            deepspeed.init_distributed(
                backend,
                timeout=COLLECTIVE_TIMEOUT,
                verbose=False,
                init_method=rendezvous.INIT_METHOD,
            )
            if backend == "gloo":  # whose threads may abort a process that unloads its libraries
                atexit.register(dist.destroy_process_group)
        assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
        self.rank, self.layout = dist.get_rank(), layout
        self.is_main = self.rank == 0  # this process writes, prints and decides
        self.dp_rank, self.dp_size = self.layout.place(self.rank).dp, self.layout.dp
        seed = self.layout.noise_seed(seed, self.rank)
        enable_full_determinism(seed) if full_determinism else set_seed(seed)

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        """Sums over the data slices, or `max` over all ranks, of a few numbers.

        Ranks of one slice must have the same numbers.
        """
        block = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(block, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
        return (block / (self.layout.sp * self.layout.tp) if op == "sum" else block).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each data slice, on every rank: that of the slice's first rank.

        Values are pickled: for small objects.
        """
        values = self.gather_ranks(value)
        return [values[ranks[0]] for ranks in self.layout.slice_ranks()]

    def gather_ranks(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank. Values are pickled: for small objects."""
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    @contextmanager
    def loading(self, config: dict[str, Any]) -> Iterator[None]:
        """Within it, Transformers loads weights directly into ZeRO-3 shards if `config` asks for
        stage 3.
        """
        live = HfDeepSpeedConfig(config) if config["zero_optimization"]["stage"] == 3 else None
        try:
            yield
        finally:
            del live  # Transformers has a weak reference to it: while it lives, every model is loaded sharded


class FrozenModel:
    """A model for forwards only. Under ZeRO 3 it is sharded like the trained model.

    If it is offloaded, it is on the device from a use until `rest`; ZeRO 3 brings single layers by
    itself.
    """

    def __init__(
        self, strategy: Strategy, load: Callable[[], nn.Module], *, offload: bool = False
    ) -> None:
        config, self._device = (
            ds_config.inference_config(strategy.config, offload=offload),
            strategy.device,
        )
        sharded = config["zero_optimization"]["stage"] == 3
        with strategy.loading(config):
            self._module = load().requires_grad_(False).eval()
        if sharded:
            self._module = initialize(config, self._module)
            self._module.eval()  # returns None, unlike the method of a module
        elif not offload:
            self._module.to(self._device)
        self._moves = offload and not sharded

    def on_device(self) -> nn.Module:
        """The model, where it can be called."""
        return self._module.to(self._device) if self._moves else self._module

    def __call__(self, *args: Any) -> Any:
        return self.on_device()(*args)

    def rest(self) -> None:
        """Make room for others."""
        if self._moves:
            self._module.to("cpu")


def initialize(config: dict[str, Any], module: nn.Module, **parts: Any) -> Any:
    """A DeepSpeed engine. DeepSpeed's printed reports about memory are dropped."""
    model_config: Any = module.config
    sized = ds_config.with_bucket_sizes(config, model_config.get_text_config().hidden_size)
    with redirect_stdout(io.StringIO()):
        return deepspeed.initialize(model=module, config=sized, **parts)[0]
