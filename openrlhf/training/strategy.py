"""A rank's view of the process group, with its device and collectives. Also, frozen models."""

from __future__ import annotations

import atexit
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, enable_full_determinism, set_seed

from openrlhf import rendezvous
from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.ring import Ring
from openrlhf.training import devices, ds_config, tensor_parallel
from openrlhf.training.layout import RankLayout
from openrlhf.training.quiet_deepspeed import HfDeepSpeedConfig, deepspeed
from openrlhf.training.whole import has_adapters

COLLECTIVE_TIMEOUT = timedelta(hours=1)


class Strategy:
    """A rank's view of the process group: its device, its rank, and collectives over all ranks."""

    def __init__(
        self,
        ds: DeepSpeedConfig,
        layout: RankLayout,
        *,
        seed: int,
        full_determinism: bool = False,
    ) -> None:
        """Join the process group, or reuse the group that this process has already joined."""
        self.config = ds
        self.layout = layout
        devices.complete_launcher_environment()
        self.device = torch.device("cpu")
        backend = "gloo"
        if devices.device_kind() == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            backend = "nccl"
        if not dist.is_initialized():
            deepspeed.init_distributed(
                backend,
                timeout=COLLECTIVE_TIMEOUT,
                verbose=False,
                init_method=rendezvous.INIT_METHOD,
            )
            # gloo's threads may abort the process when libraries are unloaded
            if backend == "gloo":
                atexit.register(dist.destroy_process_group)
        assert dist.get_world_size() == layout.world_size
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0  # the main process writes files, prints and makes decisions
        self.dp_rank = self.rank // layout.ranks_per_slice
        self.dp_size = layout.dp
        self.ring = self._join_ring()
        noise_seed = layout.noise_seed(seed, self.rank)
        if full_determinism:
            enable_full_determinism(noise_seed)
        else:
            set_seed(noise_seed)

    def _join_ring(self) -> Ring | None:
        """Return the ring of this rank, or None if no ranks share a sequence. Collective."""
        if self.layout.sp == 1:
            return None
        joined: Ring | None = None
        for ranks in self.layout.rings():
            group: Any = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
            if self.rank in ranks:
                joined = Ring(group=group, ranks=ranks, rank=ranks.index(self.rank))
        return joined

    def share_sequences(self, module: nn.Module) -> nn.Module:
        """If this rank is in a ring, let a model share its sequences with the other ranks of the
        ring. Raises UserError for a model that lays out its own batches.
        """
        if self.ring is None:
            return module
        if not hasattr(module, "ring"):
            raise UserError(
                f"--ds.ring_attn_size {self.ring.size}: {type(module).__name__} does not divide "
                "its sequences over ranks. Use --ds.ring_attn_size 1, or a model class of this "
                "package."
            )
        shared: Any = module
        shared.ring = self.ring
        return module

    def all_reduce(self, values: Sequence[float], op: Literal["sum", "max"] = "sum") -> list[float]:
        """Return each number's sum over the data slices or its maximum over all ranks.

        The ranks of a slice must pass the same numbers.
        """
        block = torch.tensor(values, dtype=torch.float64, device=self.device)
        if op == "max":
            dist.all_reduce(block, op=dist.ReduceOp.MAX)
        else:
            dist.all_reduce(block)
            block /= self.layout.ranks_per_slice
        return block.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values from the first rank of each data slice, on every rank.

        Values are pickled and should therefore be small.
        """
        values = self.gather_ranks(value)
        return [values[ranks[0]] for ranks in self.layout.slice_ranks()]

    def gather_ranks(self, value: Any) -> list[Any]:
        """Return the values from all ranks, on every rank.

        Values are pickled and should therefore be small.
        """
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    @contextmanager
    def loading(self, config: dict[str, Any]) -> Iterator[None]:
        """Load weights directly into shards until the block exits, if `config` uses ZeRO 3."""
        sharding: HfDeepSpeedConfig | None = None
        if config["zero_optimization"]["stage"] == 3:
            # DeepSpeed creates the groups for --ds.zpg only once.
            # Without this reset, a second model would raise an error.
            deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
            # Keep Transformers from splitting layers, because it cannot split experts.
            unsplit = {name: value for name, value in config.items() if name != "tensor_parallel"}
            sharding = HfDeepSpeedConfig(unsplit)
        try:
            yield
        finally:
            # Transformers keeps a weak reference to this object.
            # While the object exists, Transformers shards every model.
            del sharding


class FrozenModel:
    """A model that is not trained.

    With ZeRO 3, a frozen model is sharded like the trained model. An offloaded model is moved to
    the device at its first use and stays there until `rest` is called. With ZeRO 3, DeepSpeed moves
    one layer at a time instead.
    """

    def __init__(
        self, strategy: Strategy, load: Callable[[], nn.Module], *, offload: bool = False
    ) -> None:
        config = ds_config.inference_config(strategy.config, offload=offload)
        self._device = strategy.device
        sharded = config["zero_optimization"]["stage"] == 3
        with strategy.loading(config):
            self._loaded: Any = load()
            self._module = strategy.share_sequences(self._loaded).requires_grad_(False).eval()
        if sharded or "tensor_parallel" in config:
            self._module = initialize(config, self._module)
            self._module.eval()  # a separate statement, because DeepSpeed's method returns None
        elif not offload:
            self._module.to(self._device)
        self._moves = offload and not sharded  # True if moved between device and CPU memory

    @property
    def config(self) -> PretrainedConfig:
        """The Transformers configuration of a model of this package."""
        return self._loaded.config

    def on_device(self) -> nn.Module:
        """Return the model, after moving it to the device if it is offloaded."""
        if self._moves:
            return self._module.to(self._device)
        return self._module

    def __call__(self, *args: Any) -> Any:
        return self.on_device()(*args)

    def rest(self) -> None:
        """Move the model to CPU memory until its next use, if it is offloaded."""
        if self._moves:
            self._module.to("cpu")


def initialize(config: dict[str, Any], module: nn.Module, **arguments: Any) -> Any:
    """Return a DeepSpeed engine for a model, without printing DeepSpeed's memory reports."""
    model_config: Any = module.config
    sized = ds_config.with_bucket_sizes(config, model_config.get_text_config().hidden_size)
    complete = tensor_parallel.complete_config(sized, module)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        if "tensor_parallel" in complete and has_adapters(module):
            stack.enter_context(tensor_parallel.adapters_visible())
        engine: Any = deepspeed.initialize(model=module, config=complete, **arguments)[0]
    if "tensor_parallel" in complete:
        # DeepSpeed compares the ranks' inputs by pickling them, and functions cannot be pickled.
        engine.first_dataloader_check.remove()
    return engine
