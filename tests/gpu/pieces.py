"""Cuts files for a GPU machine without a network into pieces that each fit into one transfer.

The module uses only the standard library, because the machine has no packages installed yet.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
MANIFEST = "manifest.json"
MARGIN = MIB // 4  # reserved for the manifest of each piece


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A folder with one part of an archive and a manifest of all parts."""

    folder: Path
    nbytes: int


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_nbytes(root: Path) -> int:
    """Return the size of the files that a copy of the working tree contains."""
    command = ["git", "-C", root, "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = [root / name for name in listed.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


# ---- here: packing


def pack(files: Iterable[tuple[str, Path]], out: Path, room: int) -> list[Piece]:
    """Pack files, keyed by name in the archive, into as few pieces of `room` bytes as possible.

    Text files are compressed, unlike wheels and .tar.xz archives, which are already compressed.
    Raises ValueError if `room` is less than a MiB.
    """
    if room < MIB:
        raise ValueError(f"{room / MIB:.1f} MiB is too little room for a piece")
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    whole = out / "kit.tar"
    with tarfile.open(whole, "w") as archive:
        for name, path in files:
            if path.suffix in (".whl", ".xz", ".gz"):
                archive.add(path, name)
            else:
                compressed = out / "compressed"
                compressed.write_bytes(gzip.compress(path.read_bytes()))
                archive.add(compressed, f"{name}.gz")
                compressed.unlink()
    pieces = split(whole, out, room - MARGIN)
    whole.unlink()
    return pieces


def split(whole: Path, out: Path, room: int) -> list[Piece]:
    """Cut a file into as few equal parts of at most `room` bytes as possible."""
    nbytes = whole.stat().st_size
    count = max(1, -(-nbytes // room))
    length = -(-nbytes // count)
    parts = []
    with whole.open("rb") as file:
        for number in range(1, count + 1):
            folder = out / f"{number:02}"
            folder.mkdir()
            part = folder / f"part{number:02}"
            part.write_bytes(file.read(length))
            parts.append(part)
    sums = {part.name: sha256(part) for part in parts}
    pieces = []
    for part in parts:
        (part.parent / MANIFEST).write_text(json.dumps(sums))
        pieces.append(Piece(folder=part.parent, nbytes=part.stat().st_size))
    return pieces


# ---- there: receiving


class DamagedPiece(Exception):
    """A piece whose content has changed since it was packed."""


def receive(piece: Path, store: Path) -> list[str]:
    """Copy a piece to `store`, which is kept between calls. Returns the names of missing parts.

    Raises DamagedPiece if the content was changed or belongs to another pack.
    """
    sums: dict[str, str] = json.loads((piece / MANIFEST).read_text())
    store.mkdir(parents=True, exist_ok=True)
    kept = store / MANIFEST
    if kept.exists() and json.loads(kept.read_text()) != sums:
        raise DamagedPiece(f"{store} has pieces of another pack. Delete it and copy all pieces.")
    kept.write_text(json.dumps(sums))
    for part in sorted(piece.glob("part*")):
        if sha256(part) != sums[part.name]:
            raise DamagedPiece(f"{part} is damaged. Copy it again.")
        shutil.copy(part, store / part.name)
    return [name for name in sums if not (store / name).exists()]


def unpack(store: Path, kit: Path) -> None:
    """Join the received parts, and extract them to `kit`."""
    joined = store / "kit.tar"
    with joined.open("wb") as whole:
        for name in sorted(json.loads((store / MANIFEST).read_text())):
            with (store / name).open("rb") as part:
                shutil.copyfileobj(part, whole, 16 * MIB)
    with tarfile.open(joined) as archive:
        archive.extractall(kit, filter="data")
    joined.unlink()
    for compressed in kit.rglob("*.gz"):
        compressed.with_suffix("").write_bytes(gzip.decompress(compressed.read_bytes()))
        compressed.unlink()


def install(wheels: Path, site: Path, *, skip: tuple[str, ...] = ()) -> None:
    """Install wheels into `site`, except wheels whose names begin with an entry of `skip`.

    A *.tar.xz archive contains a site folder with packages that are already installed.
    """
    site.mkdir(parents=True, exist_ok=True)
    for path in sorted(wheels.glob("*.tar.xz")):
        with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(site, filter="tar")
    files = [str(path) for path in sorted(wheels.glob("*.whl")) if not path.name.startswith(skip)]
    if files:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        options = ["--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
        subprocess.run([*pip, *options, *files], check=True)
