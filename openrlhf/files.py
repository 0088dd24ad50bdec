"""Files that survive a crash: atomic writes, hashes, and syncs to disk. Standard library only."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

BLOCK = 2**16  # bytes
SAMPLES = 256  # blocks hashed of a long file: 16 MiB


class Disk(NamedTuple):
    """Bytes of a file system; `total` is 0 if it reports nothing."""

    total: int
    free: int


def disk_of(folder: Path) -> Disk:
    """Return the file system of a folder, which may not exist yet."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    usage = shutil.disk_usage(there)
    return Disk(total=usage.total, free=usage.free)


def fingerprint(path: Path) -> str:
    """SHA-256 of a file of up to 16 MiB, or of 256 blocks of 64 KiB of a longer file, evenly spread
    from end to end.

    The hash detects every lost stretch longer than 1/255 of a file, in about 10 ms. Hashing whole
    files would add a minute per 100 GB to each save and each resume.
    """
    size = path.stat().st_size
    count = min(SAMPLES, -(-size // BLOCK))
    last = max(size - BLOCK, 0)
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for block in range(count):
            file.seek(last * block // max(count - 1, 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def write_atomically(
    path: Path, contents: str | bytes | Iterable[str], *, mode: int | None = None
) -> None:
    """Replace `path` by a file with these contents, or parts of them. A kill leaves the old file or
    the new one.

    `mode`: its permissions; None leaves them to the process's umask.
    """
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        for part in [contents] if isinstance(contents, str | bytes) else contents:
            file.write(part.encode(errors="replace") if isinstance(part, str) else part)
        file.flush()
        os.fsync(file.fileno())
    move(new, path)


def move(source: Path, target: Path) -> None:
    """Rename `source` to `target`, safe against power loss. Create missing parent directories."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(source, target)
    sync(target.parent)
    sync(source.parent)


def sync_tree(directory: Path) -> list[Path]:
    """Bring everything in `directory` to disk. Returns the files, sorted."""
    files: list[Path] = []
    for parent, _, names in os.walk(directory, topdown=False):
        files += [Path(parent, name) for name in names]
        for path in [*(Path(parent, name) for name in names), Path(parent)]:
            sync(path)
    return sorted(files)


def sync(path: Path) -> None:
    """Bring one file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # some network file systems cannot sync a directory
    finally:
        os.close(descriptor)
