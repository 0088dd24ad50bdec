"""Optimizer state and parameters in files on a drive (--ds.nvme_path).

The files are mapped into memory, so DeepSpeed and the optimizer use them like state in CPU memory,
and all results are those of --ds.adam_offload. The kernel writes their pages to the drive, and
frees the memory when it is needed. The files have no names in the folder, so runs cannot share
files, and even a killed run leaves no file behind.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.serialization import config as serialization

from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.files import disk_of
from openrlhf.units import GIB, MIB

MIN_BYTES = MIB  # smaller tensors stay in memory


class StateOnDrive(TorchFunctionMode):
    """A mode in which large flat tensors in CPU memory are created in files in a folder.

    DeepSpeed and the optimizers create gradients and moments with `torch.zeros` and
    `torch.zeros_like`, and master weights with `Tensor.clone`. With `has_weights`, the shards of
    weights, which DeepSpeed creates with `torch.empty`, are also in files.
    """

    def __init__(self, folder: str, *, has_weights: bool) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.factories: set[Any] = {torch.zeros, torch.zeros_like}
        if has_weights:
            self.factories.add(torch.empty)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the result of a torch function, in a file if it is large, flat and on the CPU."""
        options = kwargs or {}
        if func is Tensor.pin_memory and is_on_drive(args[0]):
            return args[0]  # DeepSpeed pins shards of weights, which would copy them into memory
        if func is Tensor.clone and is_large(args[0]):
            return self.copy_of(args[0])
        if func in self.factories and args:
            device = options.get("device") or getattr(args[0], "device", "cpu")
            planned: Tensor = func(*args, **options | {"device": "meta", "pin_memory": False})
            if torch.device(device).type == "cpu" and is_large(planned):
                return self.zeros(planned.numel(), planned.dtype)
        return func(*args, **options)

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in a new file. Raises UserError if the file cannot be made."""
        size_bytes = size * dtype.itemsize
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder) as file:  # has no name in the folder
                # Reserve the space, because a write to a full drive would kill the process.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                path = f"/proc/self/fd/{file.fileno()}"
                storage: Any = torch.UntypedStorage.from_file(path, True, size_bytes)
        except (OSError, RuntimeError) as error:
            free = disk_of(self.folder).free
            raise UserError(
                f"--ds.nvme_path {self.folder}: a file of {size_bytes / GIB:.2f} GiB could not be "
                f"created, with {free / GIB:.2f} GiB free ({error}). Free some space, or use "
                "another folder."
            ) from error
        tensor: Any = torch.empty(0, dtype=dtype)
        return tensor.set_(storage, 0, (size,))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a flat tensor in a new file."""
        return self.zeros(tensor.numel(), tensor.dtype).copy_(tensor.detach())

    @contextmanager
    def reading(self, optimizer: Optimizer) -> Iterator[None]:
        """Read a checkpoint in the block, then move its large optimizer state to files.

        Checkpoints are mapped into memory, because they may be larger than CPU memory. Smaller
        state is copied, because it would keep its file from being deleted.
        """
        settings: Any = serialization
        with self, settings.patch({"load.mmap": True}):
            yield
        for state in optimizer.state.values():
            for name, value in state.items():
                if not isinstance(value, Tensor) or is_on_drive(value):
                    continue
                if is_large(value):
                    state[name] = self.copy_of(value)
                else:
                    state[name] = value.clone()


def state_on_drive(ds: DeepSpeedConfig) -> StateOnDrive | None:
    """Return the mode for --ds.nvme_path, or None if the flag is not set."""
    if ds.nvme_path is None:
        return None
    return StateOnDrive(ds.nvme_path, has_weights=ds.param_offload == "nvme")


def is_large(tensor: Tensor) -> bool:
    """Return whether a tensor is flat, large, and not on a GPU."""
    is_flat = tensor.dim() == 1 and tensor.device.type != "cuda"
    return is_flat and tensor.nbytes >= MIN_BYTES


def is_on_drive(tensor: Tensor) -> bool:
    """Return whether a tensor is in a file."""
    return tensor.untyped_storage().filename is not None
