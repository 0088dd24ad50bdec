"""DeepSpeed's universal checkpoints: optimizer state per parameter, for any layout of ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.config.flags import UserError
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.training.zero3_files import Zero3Files

CONVERTER = "deepspeed.checkpoint.ds_to_universal"


def is_sharded_differently(checkpoint: Path, layout: RankLayout) -> bool:
    """Return whether the checkpoint's optimizer state is sharded for a different layout of ranks.

    ZeRO 0 does not shard the optimizer state. The files have names such as
    zero_pp_rank_0_mp_rank_01_optim_states.pt, with the tensor-parallel rank at the end.
    """
    files = list(checkpoint.glob("*_optim_states.pt"))
    if not files:
        return False
    of_last_rank = list(checkpoint.glob(f"*_mp_rank_{layout.tp - 1:02d}_optim_states.pt"))
    return len(files) != layout.world_size or len(of_last_rank) * layout.tp != layout.world_size


@contextmanager
def converted(strategy: Strategy, directory: str, tag: str) -> Iterator[str]:
    """Convert the checkpoint `directory/tag`, and delete the copy when the block exits. Collective.

    Yields the copy's directory. Rank 0 converts the checkpoint in CPU memory. The copy takes as
    much disk space as the checkpoint, or twice as much during the conversion.
    """
    copy = Path(directory, f".universal-{tag}")
    if strategy.is_main:
        _convert(Path(directory), tag, copy.name)
    strategy.barrier()
    yield str(copy)
    strategy.barrier()
    if strategy.is_main:
        shutil.rmtree(copy)


def _convert(directory: Path, tag: str, copy: str) -> None:
    """Write `copy/tag`. Raises UserError if the conversion fails."""
    # a killed conversion may have left this folder
    shutil.rmtree(directory / copy, ignore_errors=True)
    (directory / copy / tag).mkdir(parents=True)
    cause = ""
    if any((directory / tag).glob("zero_pp_rank_*_model_states.pt")):  # only ZeRO 3 shards models
        try:
            Zero3Files(directory / tag).write_universal(directory / copy / tag)
        except (EOFError, KeyError, OSError, RuntimeError) as error:
            cause = f"{type(error).__name__}: {error}"
    else:
        cause = _run_converter(directory, tag, copy)
    if cause:
        raise UserError(
            f"{tag} in {directory} could not be converted (--ds.use_universal_ckpt): {cause}"
        )


def _run_converter(directory: Path, tag: str, copy: str) -> str:
    """Run DeepSpeed's converter in a separate process, so that its memory is freed afterwards.

    Returns the end of the error output, or an empty string if the conversion succeeds.
    """
    # Use relative paths, because folder names may contain brackets.
    # The converter treats paths as glob patterns.
    folders = ["--input_folder", tag, "--output_folder", f"{copy}/{tag}"]
    # The strict check rejects frozen weights, which checkpoints do not contain.
    options = ["--inject_missing_state", "--no_strict"]
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, *options, *folders],
        cwd=directory,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return ""
    return done.stderr.strip()[-2000:] or f"{CONVERTER} failed"
