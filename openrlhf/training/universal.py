"""DeepSpeed's universal checkpoints: optimizer state per parameter, for any number of ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.config.flags import UserError
from openrlhf.training.strategy import Strategy

CONVERTER = "deepspeed.checkpoint.ds_to_universal"


def is_sharded_for_other_ranks(checkpoint: Path, ranks: int) -> bool:
    """Return whether the checkpoint's optimizer state is sharded for a different number of ranks.

    ZeRO 0 does not shard the optimizer state.
    """
    return len(list(checkpoint.glob("*_optim_states.pt"))) not in (0, ranks)


@contextmanager
def converted(strategy: Strategy, directory: str, tag: str) -> Iterator[str]:
    """Convert the checkpoint `directory/tag`, and delete the copy when the block exits. Collective.

    Yields the copy's directory. Rank 0 converts the checkpoint in CPU memory. The copy takes as
    much disk space as the checkpoint, and twice as much during the conversion.
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
    """Write `copy/tag` in a separate process, which frees its memory when it exits.

    Raises UserError if the conversion fails.
    """
    # a killed conversion may have left this folder
    shutil.rmtree(directory / copy, ignore_errors=True)
    (directory / copy).mkdir()
    # Use relative paths, because the converter treats paths as glob patterns and folder names may
    # contain brackets.
    folders = ["--input_folder", tag, "--output_folder", f"{copy}/{tag}"]
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, "--inject_missing_state", *folders],
        cwd=directory,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        cause = done.stderr.strip()[-2000:]
        raise UserError(
            f"{tag} in {directory} could not be converted (--ds.use_universal_ckpt): {cause}"
        )
