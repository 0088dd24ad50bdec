"""Muon: an optimizer that orthogonalizes the momentum of each matrix.

Orthogonalization needs complete matrices, but ZeRO gives an optimizer flat tensors that contain
parts of many parameters. `Muon.attach` finds these parts of parameters. In each step, the ranks
exchange parts so that each rank can orthogonalize some of the matrices. Each rank then sends the
other ranks their parts of its results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.algorithms.orthogonal import orthogonalized
from openrlhf.training import tensor_parallel
from openrlhf.training.masters import own_span
from openrlhf.training.whole import full_shape

# Muon's momentum has the same name as Adam's first moment.
# DeepSpeed moves states with this name to CPU memory.
MOMENTUM = "exp_avg"


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """This rank's part of a matrix, or of a stack of matrices, in a flat tensor."""

    parameter: nn.Parameter
    start: int  # offset of the part in the flat tensor
    sizes: tuple[int, ...]  # number of elements in each rank's part
    rank: int  # this rank

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of this part in a tensor that has the layout of the flat tensor."""
        return flat.view(-1).narrow(0, self.start, self.sizes[self.rank])


class Muon(torch.optim.AdamW):
    """Muon for the groups with `is_muon`, and AdamW for all other groups.

    For an m × n matrix W with gradient g, a Muon step is W ← (1 − ηλ) W − η √max(1, m/n) ·
    orthogonalized(u). The momentum is b ← μ b + (1 − μ) g; u is (1 − μ) g + μ b with Nesterov
    momentum, and b otherwise. Gradients are clipped before the step, by their norm over all
    parameters.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """

    def __init__(self, groups: list[dict[str, Any]], **adam: Any) -> None:
        """Create the optimizer.

        A group with `is_muon` must come first and also needs `momentum`, `nesterov` and
        `iterations`.
        """
        super().__init__(groups, **adam)
        self._matrices: list[nn.Parameter] = []
        if groups[0]["is_muon"]:
            self._matrices = list(groups[0]["params"])
        self._ranks: dist.ProcessGroup | None = None  # None if matrices are not sharded
        self._device = torch.device("cpu")
        self._parts: dict[Tensor, list[MatrixPart]] = {}  # flat tensor → parts of matrices

    def attach(self, zero: Any, device: torch.device) -> None:
        """Find the matrices in the tensors updated by this optimizer. Collective.

        `zero` is the DeepSpeed optimizer that wraps this optimizer or, with ZeRO 0, this optimizer
        itself. Matrices are exchanged and orthogonalized on `device`.
        """
        self._device = device
        if zero is self:
            for matrix in self._matrices:
                whole = MatrixPart(parameter=matrix, start=0, sizes=(matrix.numel(),), rank=0)
                self._parts[matrix] = [whole]
            return
        self._ranks = zero.dp_process_group
        if hasattr(zero, "fp16_groups"):  # ZeRO 3
            flats = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
            for number, (flat, parameters) in enumerate(flats):
                group = self.param_groups[zero.sub_group_to_group_id[number]]
                if group["is_muon"]:
                    self._parts[flat] = self._parts_of(parameters)
        elif self._matrices:
            [flat] = self.param_groups[0]["params"]
            self._parts[flat] = self._parts_of(self._matrices)

    def _parts_of(self, parameters: list[Any]) -> list[MatrixPart]:
        """Return this rank's parts of the parameters in a flat tensor. Collective."""
        starts: list[int] = []
        own_sizes: list[int] = []
        end = 0
        for parameter in parameters:
            span = own_span(parameter)
            own_sizes.append(span.stop - span.start)
            if hasattr(parameter, "ds_id"):
                starts.append(end)
                end += parameter.partition_numel()  # includes the padding of the last shard
            elif parameter._hp_mapping is None:
                starts.append(0)  # this rank has no part of the parameter
            else:
                starts.append(parameter._hp_mapping.hp_fragment_address.start)
        own = torch.tensor(own_sizes, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._ranks))]
        dist.all_gather(gathered, own, group=self._ranks)
        parts: list[MatrixPart] = []
        rank = dist.get_rank(self._ranks)
        for parameter, start, *sizes in zip(parameters, starts, *gathered, strict=True):
            parts.append(
                MatrixPart(
                    parameter=parameter, start=start, sizes=tuple(map(int, sizes)), rank=rank
                )
            )
        # The ranks process consecutive matrices together, so these should have similar sizes.
        # All ranks must use the same order.
        parts.sort(key=lambda part: full_shape(part.parameter), reverse=True)
        return parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters in all groups.

        If DeepSpeed partitions the parameters, all ranks must call this method. If `closure` is
        set, first call it to compute the gradients, and return its loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        others: list[dict[str, Any]] = []
        for group in groups:
            if not group["is_muon"]:
                others.append(group)
                continue
            for flat in group["params"]:
                if flat.grad is not None:
                    self._update(flat, group)
        self.param_groups = others
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def _update(self, flat: Tensor, group: dict[str, Any]) -> None:
        """Update the parts of matrices in a flat tensor. Collective."""
        gradient = cast(Tensor, flat.grad)
        state = self.state[flat]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(flat)
            state["step"] = torch.zeros(())  # AdamW loads only states that have a step count
        momentum: Tensor = state[MOMENTUM]
        momentum.lerp_(gradient, 1 - group["momentum"])
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        parts = self._parts[flat]
        ranks = len(parts[0].sizes)
        for first in range(0, len(parts), ranks):
            chunk = parts[first : first + ranks]
            directions: list[Tensor] = []
            for part in chunk:
                direction = part.of(momentum)
                if group["nesterov"]:
                    direction = part.of(gradient).lerp(direction, group["momentum"])
                directions.append(direction)
            steps = self._orthogonalized_parts(chunk, directions, group["iterations"])
            for part, step in zip(chunk, steps, strict=True):
                part.of(flat).sub_(step.to(flat), alpha=group["lr"])

    def _orthogonalized_parts(
        self, chunk: list[MatrixPart], directions: list[Tensor], iterations: int
    ) -> list[Tensor]:
        """Return this rank's parts of the orthogonalized matrices of a chunk. Collective.

        Each rank orthogonalizes the matrix whose index in the chunk equals the rank.
        """
        rank = chunk[0].rank
        own_sizes = [part.sizes[rank] for part in chunk]
        if self._ranks is None:
            return [_muon_direction(chunk[0].parameter, directions[0], iterations)]
        missing = [0] * (dist.get_world_size(self._ranks) - len(chunk))
        sent = torch.cat(directions).to(self._device)
        sizes = [0] * len(chunk[0].sizes)  # number of elements on each rank
        if rank < len(chunk):
            sizes = list(chunk[rank].sizes)
        matrix = sent.new_empty(sum(sizes))
        # Parts arrive in the order of the ranks, which is also their order in the matrix.
        dist.all_to_all_single(matrix, sent, sizes, own_sizes + missing, group=self._ranks)
        if rank < len(chunk):
            matrix = _muon_direction(chunk[rank].parameter, matrix, iterations)
        dist.all_to_all_single(sent, matrix, own_sizes + missing, sizes, group=self._ranks)
        return list(sent.split(own_sizes))


def _muon_direction(parameter: Any, flat: Tensor, iterations: int) -> Tensor:
    """Return √max(1, m/n) · orthogonalized(matrix), flattened, where `flat` is the matrix.

    With tensor parallelism, `flat` and the result are this rank's parts of a matrix. All ranks must
    then make this call, and every rank computes the entire matrix.
    """
    shape = getattr(parameter, "ds_shape", parameter.shape)
    whole = tensor_parallel.joined(parameter, flat.view(shape))
    rows, columns = whole.shape[-2:]
    direction = torch.empty_like(whole)
    # processes a stack of experts one matrix at a time, to save memory
    for matrix, result in zip(
        whole.view(-1, rows, columns), direction.view(-1, rows, columns), strict=True
    ):
        result.copy_(orthogonalized(matrix, iterations) * max(1.0, rows / columns) ** 0.5)
    return tensor_parallel.part_of(parameter, direction).flatten()
