"""Hugging Face exports: folders that `from_pretrained` and an unmodified vLLM server can load.

An adapter is exported to a folder that PEFT can load.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.checkpoints.reloaded import TrainedState, compare_files, compare_reloaded
from openrlhf.checks import Finding
from openrlhf.config.flags import UserError
from openrlhf.config.places import OWNED
from openrlhf.files import disk_of
from openrlhf.models.adapters import save_adapter
from openrlhf.models.stored_files import writable, write_generation
from openrlhf.training.whole import has_adapters
from openrlhf.units import in_gib

ASIDE = ".export-"  # prefix of temporary folders


class ExportError(UserError, RuntimeError):
    """A failed model write. The message names the folder and the files written so far."""


class UnwritableError(ExportError, OSError):
    """A failed write of a model's files because of a full disk, a quota, or a file size limit."""


def export_hf(
    buckets: Iterable[list[tuple[str, Tensor]]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    writes: bool,
    trained: TrainedState | None = None,
    final: bool = True,
) -> None:
    """Write weights, configuration and tokenizer to the folder `path`, replacing any model in it.

    `buckets` yields full parameters or, for a model with adapters, only the trained parameters.
    Iterating over the buckets may be collective: every rank iterates, and the rank that sets
    `writes` keeps the tensors. With `trained`, the written model is compared with the trained model
    before it replaces the old model: a `final` model is loaded again, and a difference raises
    ExportError. For any other model, only the files are read, and a difference causes a notice.
    Raises ExportError.
    """
    state: dict[str, Tensor] = {}
    for bucket in buckets:
        if writes:
            state |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket}
    if not writes:
        return
    exported = list(state)
    with replacing(Path(path)) as aside:
        if has_adapters(model):
            save_adapter(model, state, aside)
        else:
            # parameters, and the buffers that are stored in files
            persistent = set(model.state_dict())
            for name, buffer in model.named_buffers():
                if name in persistent:
                    state[name] = buffer.cpu()
            write_model(model, state, aside)
            _declare_precision(aside / "config.json", state)
        tokenizer.save_pretrained(aside)
        if trained:
            for name in exported:
                trained.add(name, state.pop(name))
            state.clear()
            if final:
                compare_reloaded(aside, model, trained)
            else:
                compare_files(aside, model, trained)


def write_model(model: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    """Write a complete model to `folder`.

    If the model's configuration cannot be written, still write the weights before raising.
    """
    try:
        # Transformers writes tied weights once.
        with torch.no_grad(), writable(model):
            model.save_pretrained(folder, state_dict=dict(state), safe_serialization=True)
        write_generation(model, folder)
    except Exception:
        if not any(folder.glob("*.safetensors")):
            copies = {name: tensor.detach().clone() for name, tensor in state.items()}
            save_file(copies, folder / "model.safetensors")
        raise


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield a temporary folder for the files of a new model, then replace the model in `final`.

    The temporary folder is inside `final`, so it is on the same file system and needs the same
    permissions. Files in `final` that are not part of the model are kept. If the block fails, the
    old model is kept, and the ExportError (UnwritableError if there is no room) names the folder
    with the new files.
    """
    final = final.absolute()
    final.mkdir(parents=True, exist_ok=True)
    leftovers = list(final.glob(f"{ASIDE}*"))  # leftovers of exports that failed or were killed
    aside = final / f"{ASIDE}{os.urandom(4).hex()}"
    aside.mkdir()
    try:
        yield aside
    except UserError:
        shutil.rmtree(aside)
        raise
    except Exception as error:
        written = ", ".join(sorted(os.listdir(aside))) or "no files"
        kind = ExportError
        # The tokenizers library raises a plain Exception if it cannot write a file.
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
            kind = UnwritableError
        raise kind(
            f"The model could not be written to {final}: {type(error).__name__}: {error}. "
            f"Files written so far, in {aside}: {written}."
        ) from error
    names = os.listdir(aside)
    for old in list(final.iterdir()):
        if old.name in names or any(fnmatch(old.name, pattern) for pattern in OWNED["model"]):
            _delete(old)
    for name in names:
        os.replace(aside / name, final / name)
    aside.rmdir()
    for folder in leftovers:
        _delete(folder)


def check_disk_room(path: str, size: int) -> list[Finding]:
    """Return a failure if the disk that holds `path` has no room for a model of `size` bytes."""
    folder = Path(path).absolute()
    disk = disk_of(folder)
    if not disk.total or disk.free >= size:
        return []
    seen = f"{folder} has {in_gib(disk.free)} free, but the model takes {in_gib(size)}."
    fix = "Free some disk space, or choose a different --ckpt.output_dir."
    return [Finding(seen, fix, fails=True)]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _declare_precision(file: Path, state: dict[str, Tensor]) -> None:
    """Write the exported weights' dtype to the configuration.

    By default, Transformers writes the dtype of the model in memory.
    """
    config = json.loads(file.read_text())
    config["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
