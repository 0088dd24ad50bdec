"""Joins the shards of a ZeRO 3 checkpoint, which has one shard of each weight per rank.

DeepSpeed's converter expects every weight to be sharded over the data slices. With tensor
parallelism, only split weights are sharded over the data slices; all other weights are sharded over
all ranks.
"""

import math
import re
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATES = ("fp32", "exp_avg", "exp_avg_sq")  # DeepSpeed's names for masters and AdamW's moments
PLACE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states")


class Zero3Files:
    """The files of a ZeRO 3 checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the shapes of the weights, and find the files that contain the states."""
        self.folder = folder
        by_place: dict[tuple[int, int], Path] = {}
        for file in folder.glob("*_optim_states.pt"):
            data_rank, split_rank = map(int, PLACE.findall(file.name)[0])
            by_place[data_rank, split_rank] = file
        self.files = [file for _, file in sorted(by_place.items())]  # sorted by rank
        _, last_split_rank = max(by_place)
        self.tp = last_split_rank + 1
        # The shapes of the parts by name, for each tensor-parallel rank and parameter group.
        self.groups: list[list[dict[str, Any]]] = []
        self.shapes: list[dict[str, Any]] = []
        plan: dict[str, list[str]] = {}
        for split_rank in range(self.tp):
            model = _read(folder / f"zero_pp_rank_0_mp_rank_{split_rank:02d}_model_states.pt")
            self.groups.append(model["param_shapes"])
            self.shapes.append(dict(ChainMap(*model["param_shapes"])))
            plan = model.get("universal_checkpoint_info") or {}
        self.is_row = _matcher(plan.get("parameter_with_row_parallelism_patterns", []))
        self.is_replicated = _matcher(plan.get("tp_replicated_parameter_patterns", []))

    def whole(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """Join the flat shards of all ranks, in order, into a tensor with the weight's shape."""
        if self.tp == 1 or self.is_replicated(name):
            shape = self.shapes[0][name]
            if math.ceil(math.prod(shape) / len(shards)) < len(shards[0]):
                shards = shards[:: self.tp]  # sharded over the data slices
            return _joined(shards, shape)
        parts: list[Tensor] = []
        for split_rank in range(self.tp):
            parts.append(_joined(shards[split_rank :: self.tp], self.shapes[split_rank][name]))
        dimension = 1 if self.is_row(name) else 0
        return torch.cat(parts, dimension)

    def states(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Yield each trained weight's name, and the joined tensor of one of its `STATES`."""
        optimizers = [_read(file)["optimizer_state_dict"] for file in self.files]
        for number in range(len(self.groups[0])):
            flats: list[Tensor] = []
            for optimizer in optimizers:
                if key == "fp32":
                    flats.append(optimizer["fp32_flat_groups"][number])
                else:
                    flats.append(optimizer["optimizer_state_dict"]["state"][number][key])
            yield from self._of_group(number, flats)

    def _of_group(self, number: int, flats: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the joined tensors of a group, whose weights are all sharded in the same way."""
        shards_per_weight = len(flats) // self.tp
        needed = 0
        for shape in self.groups[0][number].values():
            needed += math.ceil(math.prod(shape) / shards_per_weight)
        if needed > len(flats[0]):
            shards_per_weight = len(flats)
        starts = [0] * len(flats)
        for name in self.groups[0][number]:
            shards: list[Tensor] = []
            for rank, flat in enumerate(flats):
                shape = self.groups[rank % self.tp][number][name]
                size = math.ceil(math.prod(shape) / shards_per_weight)
                shards.append(flat[starts[rank] : starts[rank] + size])
                starts[rank] += size
            yield name, self.whole(name, shards)

    def write_universal(self, target: Path) -> None:
        """Write the checkpoint in DeepSpeed's universal format to the folder `target`."""
        for key in STATES:
            for name, whole in self.states(key):
                file = target / "zero" / name / f"{key}.pt"
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save({"param": whole}, file)
        common = _read(self.files[0])["optimizer_state_dict"]
        del common["fp32_flat_groups"]
        torch.save(common, target / "zero" / "optimizer_state.pt")
        for file in self.folder.glob("*_model_states.pt"):
            shutil.copy(file, target)


def _matcher(patterns: Sequence[str]) -> Callable[[str], object]:
    """Return a function that checks whether a name matches any of the patterns."""
    return re.compile("|".join(patterns) or "(?!)").match


def _joined(shards: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Concatenate the shards, and drop the padding at the end."""
    return torch.cat(list(shards))[: math.prod(shape)].view(tuple(shape))


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
