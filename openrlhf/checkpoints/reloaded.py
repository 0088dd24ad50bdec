"""Reloads exported models and compares them with the trained model.

Exports in the middle of a run are not loaded: only the tensors in their files are compared, and a
difference causes a notice.

Each weight that Transformers loads from the folder is compared, by a hash of its bytes, with the
trained, merged or averaged weight. The logits of a few tokens are compared too, because they also
depend on the stored configuration: positions, adapter scales, tied weights. The trained model
computes its logits on the devices that hold it, whether or not it is sharded. The folder is loaded
by one process into CPU memory, after the export's copy of the weights is freed, so that only one
copy exists at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from openrlhf.config.flags import UserError
from openrlhf.config.machine import free_memory
from openrlhf.config.shared import LoadingConfig
from openrlhf.models.adapters import stored_adapter, stored_name, with_stored_adapter
from openrlhf.models.loading import DTYPES, LoadSpec, pin_longrope, read_model
from openrlhf.models.probe import find_gap, probe_logits
from openrlhf.models.weights import stored_weights
from openrlhf.reporting import notice
from openrlhf.training.whole import full_shape, has_adapters
from openrlhf.units import in_gib
from openrlhf.weights.buckets import bucket_hash

ROOM = 1.2  # memory needed to load a model, as a multiple of its file size
Digest = tuple[tuple[int, ...], torch.dtype, int]  # shape, dtype, hash of the bytes


class DifferentModelError(RuntimeError):
    """A difference between an export's files and the trained model."""


@dataclass(kw_only=True)
class TrainedState:
    """The trained model's weight digests (by name) and logits, with which an export is compared.

    `logits` is None if logits are not compared, for example because a 4-bit base model differs from
    its files. `precision` is the dtype in which the logits were computed. `averages` are the
    float32 averaged (EMA) weights, if the export contains them.
    """

    logits: Tensor | None
    precision: str
    max_len: int | None = None
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    digests: dict[str, Digest] = field(default_factory=dict)
    # The exported weights that differ from their averages.
    not_averages: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """Record the digest of an exported weight."""
        self.digests[name] = digest_of(tensor)
        average = self.averages.get(name)
        if average is not None and digest_of(average.to(tensor.dtype)) != self.digests[name]:
            self.not_averages.append(name)

    def require_averages(self) -> None:
        """Raise DifferentModelError if an exported weight differs from its average."""
        if self.not_averages:
            raise DifferentModelError(
                f"{_shown(self.not_averages)}: not equal to the averaged weights "
                "(--train.enable_ema)"
            )


def digest_of(tensor: Tensor) -> Digest:
    """Return a tensor's shape, dtype and hash."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), tensor.dtype, bucket_hash(pad(data, (0, -len(data) % 8)))


def _shown(names: Sequence[str]) -> str:
    """Return the first three names for a message."""
    return ", ".join(names[:3])


def compare_reloaded(folder: Path, model: PreTrainedModel, trained: TrainedState) -> None:
    """Load the exported model in `folder`, and compare it with the trained model.

    The class and configuration of `model`, the trained model, are used. Raises DifferentModelError.
    """
    trained.require_averages()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    adapted = has_adapters(model)
    if adapted:
        _compare_adapter(folder, trained)
        if trained.logits is None:
            return
        for weight in model.parameters():  # the base model
            size += math.prod(full_shape(weight)) * weight.element_size()
    free = free_memory()
    if free < ROOM * size:
        notice(
            f"The export in {folder.parent} was not reloaded and compared with the trained model, "
            f"because the model takes {in_gib(size)} and this machine has only "
            f"{in_gib(free)} of free memory."
        )
        return
    if adapted:
        load_base = partial(_load, folder, model, dtype=model.dtype)
        reloaded = with_stored_adapter(folder, load_base)
    else:
        reloaded = _load(folder, model, str(folder), dtype="auto")
        _compare_weights(reloaded.named_parameters(), trained.digests)
    if trained.max_len:
        pin_longrope(reloaded, trained.max_len)
    if trained.logits is not None:
        _compare_logits(folder, trained.logits, probe_logits(reloaded), trained.precision)


def compare_files(folder: Path, model: PreTrainedModel, trained: TrainedState) -> None:
    """Print a notice if the tensors in an export's files differ from the trained weights.

    This check is for exports in the middle of a run: the model is not loaded, and logits are not
    compared.
    """
    try:
        trained.require_averages()
        if has_adapters(model):
            _compare_adapter(folder, trained)
        else:
            buffers = dict(model.named_buffers())
            stored = stored_weights(str(folder))
            found = ((name, read()) for name, read in stored if name not in buffers)
            _compare_weights(found, trained.digests, renamed=True)
    except DifferentModelError as error:
        notice(
            f"The export in {folder.parent} does not match the trained model: {error}. The run "
            "continues."
        )


def _compare_adapter(folder: Path, trained: TrainedState) -> None:
    digests = {stored_name(name): digest for name, digest in trained.digests.items()}
    _compare_weights(stored_adapter(folder).items(), digests)


def _compare_weights(
    found: Iterable[tuple[str, Tensor]], trained: Mapping[str, Digest], *, renamed: bool = False
) -> None:
    """Raise DifferentModelError unless the names and values of the weights match.

    With `renamed`, if some names in the files are unknown, only weights with matching names are
    compared: files may store weights, such as experts, under different names or in parts.
    """
    missing = dict(trained)
    unknown: list[str] = []
    wrong: list[str] = []
    for name, tensor in found:
        digest = missing.pop(name, None)
        if digest is None:
            unknown.append(name)
        elif digest_of(tensor.to(digest[1])) != digest:
            wrong.append(name)
    if wrong:
        raise DifferentModelError(
            f"{len(wrong)} weights in the files differ from the trained weights: {_shown(wrong)}"
        )
    if renamed and unknown:
        return
    if missing:
        raise DifferentModelError(
            f"{len(missing)} trained weights are not in the files: {_shown(sorted(missing))}"
        )
    if unknown:
        raise DifferentModelError(
            f"{len(unknown)} weights in the files were not exported: {_shown(unknown)}"
        )


def _compare_logits(folder: Path, expected: Tensor, found: Tensor, precision: str) -> None:
    """Compare the logits of models with the same weights.

    The logits may come from different devices and attention kernels.
    """
    gap = find_gap(expected, found, DTYPES[precision])
    if not gap:
        return
    if gap.is_other_model:
        raise DifferentModelError(
            f"the logits of the exported and the trained model are {gap.text}"
        )
    notice(
        f"The export in {folder.parent} contains the trained weights, but the logits that "
        "Transformers computes from them on the CPU and those of the trained model are "
        f"{gap.text}. Rounding errors are usually smaller. Evaluate the exported model."
    )


def _load(
    folder: Path, model: PreTrainedModel, path: str, *, dtype: torch.dtype | str
) -> PreTrainedModel:
    """Load a model of the trained model's class into CPU memory.

    The weights come from `path`, and the configuration comes from `folder`.
    """
    configuration: Any = type(model).config_class
    is_eager = model.config._attn_implementation == "eager"
    try:
        reloaded, stored = read_model(
            type(model),
            LoadSpec(path=path, ds=LoadingConfig()),
            config=configuration.from_pretrained(folder),
            dtype=dtype,
            attn_implementation="eager" if is_eager else "sdpa",
        )
        if path == str(folder):
            stored.require_all()
    except UserError as error:  # the error's advice is for models that users provide
        raise DifferentModelError(str(error)) from error
    return reloaded
