"""DeepSpeed's universal checkpoints: the state of an optimizer by parameter instead of by rank, for
any number of ranks.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.config.flags import UserError
from openrlhf.training.strategy import Strategy

CONVERTER = ("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")


def was_sharded_otherwise(checkpoint: Path, ranks: int) -> bool:
    """Whether the optimizer's state in `checkpoint` is cut for another number of ranks. ZeRO 0 does
    not cut it.
    """
    return len(list(checkpoint.glob("*_optim_states.pt"))) not in (0, ranks)


@contextmanager
def converted(strategy: Strategy, directory: str, tag: str) -> Iterator[str]:
    """Within it, there is a directory with the checkpoint `directory/tag` in universal format.
    Collective.

    Rank 0 converts, in CPU memory. The copy needs as much room as the checkpoint, twice while it is
    made.
    """
    aside = Path(directory, f".universal-{tag}")
    if strategy.is_main:
        _convert(Path(directory), tag, aside.name)
    strategy.barrier()
    yield str(aside)
    strategy.barrier()
    if strategy.is_main:
        shutil.rmtree(aside)


def _convert(directory: Path, tag: str, aside: str) -> None:
    """Write the copy `aside/tag` in another process, which gives its memory back. Raises UserError."""
    shutil.rmtree(directory / aside, ignore_errors=True)  # of a conversion that was killed
    (directory / aside).mkdir()
    # Relative paths: the converter takes what it is given as patterns, in which brackets have a
    # meaning.
    command = [
        sys.executable,
        *CONVERTER,
        "--input_folder",
        tag,
        "--output_folder",
        f"{aside}/{tag}",
    ]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip()[-2000:]
        raise UserError(
            f"{tag} in {directory} could not be converted (--ds.use_universal_ckpt): {why}"
        )
