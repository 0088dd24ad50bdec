"""Reads a model's config.json and the headers of its safetensors files, local or on the Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from openrlhf.planning.shapes import (
    FAMILIES,
    ModelShape,
    PlanError,
    shape_from_config,
    shape_from_headers,
    text_config,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes; the format allows no more
HUB_TIMEOUT_S = 10.0
HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # owner/name, or an old name
# Reads `length` bytes of a file, starting at `start`. If `length` is None, reads to the end.
Read = Callable[[str, int, int | None], bytes]


@cache
def read_shape(path: str) -> ModelShape:
    """Read the shape of a model in a local folder or on the Hub, but not its weights.

    Headers are read only if config.json does not determine the weights of the architecture, and for
    weights that process images. Raises PlanError if the model cannot be read.
    """
    read = _reader(path)
    try:
        config: Any = json.loads(read("config.json", 0, None))
        if not isinstance(config, dict):
            raise ValueError("its config.json is not a JSON object")
        if text_config(config).get("model_type") in FAMILIES:
            shape = shape_from_config(config, path)
            if "vision_config" in config:
                shape = shape.with_vision(_headers(read))
            return shape
        try:
            headers = _headers(read)
        except FileNotFoundError:
            return shape_from_config(config, path)  # raises PlanError: unknown architecture
        return shape_from_headers(headers, config, path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"The model {path} cannot be read ({error}). Use a local folder with config.json, and "
            "with the safetensors files for less common architectures; a Hub name requires network "
            "access or a cached download."
        ) from error


def _reader(path: str) -> Read:
    """Return a function that reads files of a local model, a cached download or a Hub model."""
    folder = _local_folder(path)
    if folder is None:
        return _hub_reader(path)

    def read(name: str, start: int, length: int | None) -> bytes:
        with (folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)

    return read


def _local_folder(path: str) -> Path | None:
    """Return the folder of a local model or of its newest cached download, or None."""
    if os.path.isdir(path):
        return Path(path)
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub")))
    snapshots = hub / f"models--{path.replace('/', '--')}" / "snapshots"
    cached = [config.parent for config in snapshots.glob("*/config.json")]
    return max(cached, key=os.path.getmtime, default=None)


def _hub_reader(path: str) -> Read:
    if not HUB_NAME.fullmatch(path):
        raise PlanError(f"The folder {path} does not exist, and this is not a valid Hub name.")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise PlanError(
            f"{path} is not a local folder and not cached, and the Hub cannot be reached. Use a "
            "local folder with the model's config.json."
        )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")

    from urllib import request as http  # the import loads TLS, which local models do not need

    def read(name: str, start: int, length: int | None) -> bytes:
        request = http.Request(f"{endpoint}/{path}/resolve/main/{name}")
        if length is not None:
            request.add_header("Range", f"bytes={start}-{start + length - 1}")
        if token := os.environ.get("HF_TOKEN"):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with http.urlopen(request, timeout=HUB_TIMEOUT_S) as response:
                return response.read(length)
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(str(error)) from error
            raise

    return read


def _headers(read: Read) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all stored weights by name.

    A model that is stored in a single file has no index. Raises FileNotFoundError if a safetensors
    file is missing.
    """
    names = [SINGLE]
    with suppress(OSError):
        index = json.loads(read(INDEX, 0, None))
        names = sorted(set(index["weight_map"].values()))
    sizes: dict[str, tuple[int, ...]] = {}
    for name in names:
        length = int.from_bytes(read(name, 0, 8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{name} is not a safetensors file")
        header: dict[str, Any] = json.loads(read(name, 8, length))
        header.pop("__metadata__", None)
        for weight, stored in header.items():
            sizes[weight] = tuple(stored["shape"])
    return sizes
