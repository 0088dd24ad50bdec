"""Checks that a loaded model matches its files.

Every weight must exist, have the right size and be finite.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from openrlhf.config.flags import UserError

SHOWN_NAMES = 3  # in a message
EXPERT = re.compile(r"\.experts\.\d+\.")
OUTPUT_LAYER = "lm_head."  # a scalar model replaces this layer
Size = tuple[int, ...]


class ModelError(UserError, ValueError):
    """Error for a model that cannot be loaded. The message suggests a fix."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The differences between the files in `path` and the architecture's weights.

    Weights are named as in the architecture.
    """

    path: str
    missing: tuple[str, ...]
    # Name → (size in the files, size in the architecture), where they differ.
    sizes: Mapping[str, tuple[Size, Size]]
    unused: tuple[str, ...]  # weights in the files that the architecture does not have
    # Unused weights of layers that exist in the architecture.
    # The layers would run without these weights.
    ignored: tuple[str, ...]
    # Pairs of weights that config.json ties but that differ in the files.
    broken_ties: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, path: str, model: nn.Module, report: Mapping[str, Any]) -> Self:
        """Read Transformers' loading report about `model`."""
        unused = sorted(report["unexpected_keys"])
        ignored = [name for name in unused if _is_left_out(model, name)]
        sizes = {name: (tuple(a), tuple(b)) for name, a, b in report["mismatched_keys"]}
        missing = sorted(report["missing_keys"] - sizes.keys())
        return cls(
            path=path,
            missing=tuple(missing),
            sizes=sizes,
            unused=tuple(unused),
            ignored=tuple(ignored),
            broken_ties=_broken_ties(path, model),
        )

    @property
    def lacking(self) -> set[str]:
        """The architecture's weights that the files lack or store with the wrong size."""
        return {*self.missing, *self.sizes}

    def require_all(self, but: Collection[str] = ()) -> None:
        """Raise ModelError if weights other than those in `but` do not match their files.

        A mismatch is a weight that is missing from the files, has the wrong size there, is ignored
        by its layer, or is tied to a weight that differs.
        """
        problems: list[str] = []
        resized = [name for name in self.sizes if name not in but]
        if resized:
            first = min(resized)
            stored, required = self.sizes[first]
            problems.append(
                f"{len(resized)} weights have the wrong size: {first} is {_describe(stored)} in "
                f"{_file_of(self.path, first)} instead of {_describe(required)}"
            )
        missing = [name for name in self.missing if name not in but]
        if missing:
            problems.append(f"{len(missing)} weights are missing from the files: {_first(missing)}")
        ignored = [name for name in self.ignored if name not in but]
        if ignored:
            problems.append(
                f"{_file_of(self.path, ignored[0])} has weights that their layers would ignore: "
                f"{_first(ignored)}"
            )
        for name, other in self.broken_ties:
            problems.append(
                f"config.json ties {name} to {other} (tie_word_embeddings), but they differ in the "
                "files: Transformers uses both weights, but vLLM uses only one. If the model needs "
                "both, set tie_word_embeddings to false"
            )
        if not problems:
            return
        if missing and self.unused:
            problems.append(f"the files contain these names instead: {_first(self.unused)}")
        raise ModelError(
            f"the weights in {self.path} do not match its config.json: {'; '.join(problems)}. "
            "Download or export the model again, or correct config.json."
        )

    @property
    def notice(self) -> str | None:
        """A sentence about unused weights in the files, or None if all are used."""
        unused = [name for name in self.unused if not name.startswith(OUTPUT_LAYER)]
        if not unused:
            return None
        return (
            f"{self.path} has {len(unused)} weights that its architecture does not use: "
            f"{_first(unused)}."
        )


def _broken_ties(path: str, model: Any) -> tuple[tuple[str, str], ...]:
    """Return the pairs of weights that the configuration ties but that differ in the files."""
    held = dict(model.named_parameters(remove_duplicate=False))
    broken: list[tuple[str, str]] = []
    for pair in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        first, second = map(held.get, pair)
        if first is None or second is None or first is second:
            continue
        if first.device.type == "meta" or hasattr(first, "ds_tensor"):
            # This process has no values or only part of them.
            equal = _are_equal_in_files(path, pair)
        else:
            equal = torch.equal(first, second.to(first))
        if not equal:
            broken.append(pair)
    return tuple(broken)


def _are_equal_in_files(path: str, pair: tuple[str, str]) -> bool:
    """Return True if the files have equal tensors under both names or lack one of the tensors."""
    tensors = [read() for name, read in stored_weights(path) if name in pair]
    return len(tensors) < 2 or torch.equal(*tensors)


def stored_weights(path: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the name of each weight in a model's files, and a function that reads it.

    Call each function before advancing the iterator. `path` is a folder, or the name of a model in
    the Hub cache. Yields nothing if the model is missing. Reads safetensors files or, if none
    exist, pytorch_model*.bin.
    """
    folder = _local_folder(path)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 not a mapping
                yield name, partial(stored.get_tensor, name)
    if files:
        return
    for file in sorted(folder.glob("pytorch_model*.bin")):
        # Files written by torch before 1.6 are not zip archives and can only be read as a whole.
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        for name in weights:
            yield name, partial(weights.get, name)


def _local_folder(path: str) -> Path:
    """Return the folder of a model in the Hub cache, or `path` itself for any other model."""
    if os.path.isdir(path):
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HfHubHTTPError, OSError, ValueError):
        return Path(path)  # the program that loads the model reports missing files


def require_finite_files(path: str) -> None:
    """Raise ModelError, naming the first bad weights, if a model's files contain NaN or infinity.

    Use this check for models that are loaded by another program. Reads one tensor at a time. `path`
    is a folder, or the name of a model in the Hub cache.
    """
    broken = [name for name, read in stored_weights(path) if not is_finite(read())]
    _refuse_numbers(broken, str(_local_folder(path)))


def odd_experts(path: str) -> str | None:
    """Describe the first expert weight whose size differs from the other experts' in its layer.

    Returns None if all experts of each layer have the same sizes.
    """
    layers: dict[str, dict[str, Size]] = {}  # keyed by names without the expert's number
    files: dict[str, Path] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 not a mapping
                files[name] = file
                sizes = layers.setdefault(EXPERT.sub(".experts.", name), {})
                sizes[name] = tuple(stored.get_slice(name).get_shape())
    for sizes in layers.values():
        [(usual, _)] = Counter(sizes.values()).most_common(1)
        for name, size in sizes.items():
            if size != usual:
                return (
                    f"{name} is {_describe(size)} in {files[name]}, but the weights of the other "
                    f"experts are {_describe(usual)}"
                )
    return None


def require_finite(model: nn.Module, path: str) -> None:
    """Raise ModelError, naming the first bad weights, if a loaded model contains NaN or infinity.

    Under ZeRO 3, all ranks must call this function.
    """
    broken: list[str] = []
    sharded = False
    for name, weight in model.state_dict(keep_vars=True).items():
        sharded = sharded or hasattr(weight, "ds_tensor")
        if not is_finite(_held(weight)):
            broken.append(name)
    if sharded:
        by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, broken)
        broken_anywhere = set(chain.from_iterable(by_rank))
        broken = [name for name in model.state_dict() if name in broken_anywhere]
    _refuse_numbers(broken, path)


def _refuse_numbers(broken: list[str], path: str) -> None:
    if broken:
        raise ModelError(
            f"{len(broken)} weights in {path} are NaN or infinite: {_first(broken)} "
            f"({_file_of(path, broken[0])}). Use an earlier checkpoint, or download the model "
            "again."
        )


def is_finite(weight: Tensor) -> bool:
    """Return whether every value is finite."""
    if not weight.is_floating_point():
        return True
    if weight.dtype.itemsize == 1:  # 8-bit types do not support sums
        weight = weight.float()
    # A sum needs no extra memory. The sum is finite unless it overflows or a value is not finite.
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())


def _held(weight: Any) -> Tensor:
    """Return the values of a weight in this process.

    Under ZeRO 3, the values are the rank's shard, without the last shard's padding.
    """
    if not hasattr(weight, "ds_tensor"):
        return weight.detach()
    part: Tensor = weight.ds_tensor.flatten()
    begin = dist.get_rank(group=weight.ds_process_group) * len(part)
    return part[: max(0, weight.ds_numel - begin)]


def _is_left_out(model: nn.Module, name: str) -> bool:
    """Return whether the layer of `name` has weights, but no weight with that name."""
    owner, _, leaf = name.rpartition(".")
    try:
        held = dict(model.get_submodule(owner).named_parameters(recurse=False))
    except AttributeError:
        return False
    return bool(held) and leaf not in held


def _file_of(path: str, name: str) -> str:
    """Return the file that contains a weight, or the folder if the file is not known."""
    for index_name, single_name in (
        (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME),
        (WEIGHTS_INDEX_NAME, WEIGHTS_NAME),
    ):
        index = Path(path) / index_name
        single = Path(path) / single_name
        if index.exists():
            file = json.loads(index.read_text())["weight_map"].get(name)
            if not file:
                return path
            return str(index.with_name(file))
        if single.exists():
            return str(single)
    return path


def _describe(size: Size) -> str:
    return " × ".join(map(str, size)) or "a scalar"


def _first(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += ", …"
    return shown
