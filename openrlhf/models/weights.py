"""The check that a loaded model matches its files: every weight exists, has the right size, and is
finite.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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

SHOWN = 3  # names in a message
EXPERT = re.compile(r"\.experts\.\d+\.")
OUTPUT_LAYER = "lm_head."  # which a scalar model replaces


class ModelError(UserError, ValueError):
    """A model cannot be loaded. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The differences between the files in `path` and the weights of the architecture, by the
    architecture's names.
    """

    path: str
    missing: tuple[str, ...]
    sizes: Mapping[
        str, tuple[tuple[int, ...], tuple[int, ...]]
    ]  # of the file and of the architecture, if they differ
    unused: tuple[str, ...]  # weights of the files without a place in the architecture
    ignored: tuple[
        str, ...
    ]  # unused weights of layers that the architecture has and computes without these weights
    torn: tuple[
        tuple[str, str], ...
    ] = ()  # weights that config.json ties, but that differ in the files

    @classmethod
    def of(cls, path: str, model: nn.Module, report: Mapping[str, Any]) -> Self:
        """Read Transformers' loading report about `model`."""
        unused = sorted(report["unexpected_keys"])
        ignored: list[str] = []
        for name in unused:
            if _is_left_out(model, name):
                ignored.append(name)
        sizes = {
            name: (tuple(stored), tuple(needed))
            for name, stored, needed in report["mismatched_keys"]
        }
        missing = tuple(sorted(report["missing_keys"] - sizes.keys()))
        torn = _torn(path, model)
        return cls(
            path=path,
            missing=missing,
            sizes=sizes,
            unused=tuple(unused),
            ignored=tuple(ignored),
            torn=torn,
        )

    @property
    def lacking(self) -> set[str]:
        """The weights of the architecture that are not in the files."""
        return {*self.missing, *self.sizes}

    def require_all(self, but: Collection[str] = ()) -> None:
        """Raise ModelError if, except for `but`, weights are missing from the files or ignored by
        their layers.
        """
        problems: list[str] = []
        sizes = {name: pair for name, pair in self.sizes.items() if name not in but}
        if sizes:
            name, (stored, needed) = min(sizes.items())
            problems.append(
                f"{len(sizes)} weights do not have the size that config.json requires: {name} is {_by(stored)} in "
                f"{_file_of(self.path, name)}, and should be {_by(needed)}"
            )
        if missing := [name for name in self.missing if name not in but]:
            problems.append(f"{len(missing)} weights are missing: {_first(missing)}")
        if ignored := [name for name in self.ignored if name not in but]:
            problems.append(
                f"{_file_of(self.path, ignored[0])} has weights that the layers of this architecture would ignore: "
                f"{_first(ignored)}"
            )
        for name, other in self.torn:
            problems.append(
                f"config.json ties {name} to {other} (tie_word_embeddings), but the files have two different tensors: "
                "Transformers uses both, vLLM only one. If the model needs both, set tie_word_embeddings to false"
            )
        if not problems:
            return
        if missing and self.unused:
            problems.append(f"the files have other names instead: {_first(self.unused)}")
        raise ModelError(
            f"the weights in {self.path} do not match its config.json: {'; '.join(problems)}. "
            "Download or export the model again, or correct config.json."
        )

    @property
    def notice(self) -> str | None:
        """A sentence about weights of the files that are not used."""
        others = [name for name in self.unused if not name.startswith(OUTPUT_LAYER)]
        if not others:
            return None
        return f"{self.path} has {len(others)} weights that its architecture does not use: {_first(others)}."


def _torn(path: str, model: Any) -> tuple[tuple[str, str], ...]:
    """Return the weights that the configuration ties although the files have different values for
    them.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    pairs: list[tuple[str, str]] = []
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        first, second = held.get(name), held.get(other)
        if first is None or second is None or first is second:
            continue
        if first.device.type == "meta" or hasattr(
            first, "ds_tensor"
        ):  # no values here, or a part of them
            equal = _equal_in_files(path, name, other)
        else:
            equal = torch.equal(first, second.to(first))
        if not equal:
            pairs.append((name, other))
    return tuple(pairs)


def _equal_in_files(path: str, name: str, other: str) -> bool:
    """Return whether the files have equal tensors of both names. A name that is in no file is not
    compared.
    """
    found: list[Tensor] = []
    for each in (name, other):
        file = _file_of(path, each)
        if not (
            file.endswith(".safetensors") and Path(file).is_file()
        ):  # unknown, or one that can only be read whole
            return True
        with safe_open(file, framework="pt") as stored:
            if each not in stored.keys():  # noqa: SIM118 it is no mapping
                return True
            found.append(stored.get_tensor(each))
    return torch.equal(*found)


def require_finite_files(path: str) -> None:
    """Raise ModelError, with the first names, if weights in the files of a model are NaN or
    infinite.

    For models that another program loads. Reads one tensor at a time, from safetensors or, where
    there are none, from pytorch_model*.bin. `path` is a folder, or the name of a model in the hub's
    cache.
    """
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except (HfHubHTTPError, OSError, ValueError):
            return  # the program that loads it says what is missing
    found: list[str] = []
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as stored:
            found += [name for name in stored.keys() if not is_finite(stored.get_tensor(name))]  # noqa: SIM118 it is no mapping
    for file in [] if files else sorted(folder.glob("pytorch_model*.bin")):
        # Files of torch before 1.6 are no zip archives and can only be read whole.
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        found += [name for name, weight in weights.items() if not is_finite(weight)]
    _refuse_numbers(found, str(folder))


def odd_experts(path: str) -> str | None:
    """Return the first expert's weight whose size differs from that of most experts of its layer,
    in words.
    """
    sizes: dict[
        str, dict[str, tuple[int, ...]]
    ] = {}  # by the names without the number of the expert
    files: dict[str, Path] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 it is no mapping
                files[name] = file
                sizes.setdefault(EXPERT.sub(".experts.", name), {})[name] = tuple(
                    stored.get_slice(name).get_shape()
                )
    for experts in sizes.values():
        [(usual, _)] = Counter(experts.values()).most_common(1)
        for name, size in experts.items():
            if size != usual:
                return f"{name} is {_by(size)} in {files[name]}, and the other experts' are {_by(usual)}"
    return None


def require_finite(model: nn.Module, path: str) -> None:
    """Raise ModelError, with the names, if weights of a loaded model are NaN or infinite.
    Collective under ZeRO 3.
    """
    found: list[str] = []
    sharded = False
    for name, weight in model.state_dict(keep_vars=True).items():
        sharded = sharded or hasattr(weight, "ds_tensor")
        if not is_finite(_held(weight)):
            found.append(name)
    if sharded:
        parts: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, found)
        found = [name for name in model.state_dict() if any(name in part for part in parts)]
    _refuse_numbers(found, path)


def _refuse_numbers(found: list[str], path: str) -> None:
    if found:
        raise ModelError(
            f"{len(found)} weights in {path} are NaN or infinite: {_first(found)} ({_file_of(path, found[0])}). "
            "Use an earlier checkpoint, or download the model again."
        )


def is_finite(weight: Tensor) -> bool:
    """Return whether no number is NaN or infinite."""
    if not weight.is_floating_point():
        return True
    if weight.dtype.itemsize == 1:  # no sums in 8 bits
        weight = weight.float()
    # A sum needs no extra memory. It is finite unless a number is not, or the sum overflows.
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())


def _held(weight: Any) -> Tensor:
    """The numbers of a weight in this process: under ZeRO 3 its part, without the padding of the
    last part.
    """
    if not hasattr(weight, "ds_tensor"):
        return weight.detach()
    part: Tensor = weight.ds_tensor.flatten()
    begin = dist.get_rank(group=weight.ds_process_group) * len(part)
    return part[: max(0, weight.ds_numel - begin)]


def _is_left_out(model: nn.Module, name: str) -> bool:
    """Return whether a layer that holds weights of its own has no place for the weight `name`."""
    owner, _, leaf = name.rpartition(".")
    try:
        held = dict(model.get_submodule(owner).named_parameters(recurse=False))
    except AttributeError:
        return False
    return bool(held) and leaf not in held


def _file_of(path: str, name: str) -> str:
    """The file with a weight, or the folder if that is not known."""
    for index_name, single_name in (
        (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME),
        (WEIGHTS_INDEX_NAME, WEIGHTS_NAME),
    ):
        index, single = Path(path) / index_name, Path(path) / single_name
        if index.exists():
            file = json.loads(index.read_text())["weight_map"].get(name)
            return str(index.with_name(file)) if file else path
        if single.exists():
            return str(single)
    return path


def _by(size: tuple[int, ...]) -> str:
    return " × ".join(map(str, size)) or "a number"


def _first(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SHOWN])
    return f"{shown}, …" if len(names) > SHOWN else shown
