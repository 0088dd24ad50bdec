"""Results of a command, written to disk as they arrive, so that a killed command can resume."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openrlhf.checkpoints.manifest import differences
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import FirstStart
from openrlhf.files import write_atomically
from openrlhf.observability.run_folder import json_line, set_aside
from openrlhf.reporting import notice

REQUEST = "request, before its rows were rendered"  # additional key in a record


def start_of_request(final: Path, request: str) -> FirstStart:
    """Return the time when the command that writes, or wrote, the final file was first started.

    If no other command wrote the file, or if that command completed a different request, return the
    start of this command.
    """
    for begun in (part_of(final), record_of(final)):
        if begun.exists():
            with suppress(ValueError):
                header = json.loads(begun.read_bytes().partition(b"\n")[0])
                if is_complete(final) and header.get(REQUEST, request) != request:
                    break
                return FirstStart.of(header)
    return FirstStart.here()


def part_of(final: Path) -> Path:
    """Return the path of the journal, which contains partial results."""
    return final.with_name(f"{final.name}.part")


def is_complete(final: Path) -> bool:
    """Return whether the final file exists and there are no partial results to resume."""
    return final.exists() and not part_of(final).exists()


def record_of(final: Path) -> Path:
    """Return the path of the record, which identifies the command that wrote the final file."""
    return final.with_name(f"{final.name}.request")


@contextmanager
def writing_results(path: Path) -> Iterator[None]:
    """Convert OSErrors to DataErrors that name `path` and say how to continue."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--output_path: cannot write {path}: {error.strerror or error}. Make room or make the "
            "path writable, then run the same command again. It keeps the rows finished so far, if "
            "any. To start over instead, choose another --output_path."
        ) from error


class Journal:
    """Partial results by row number, in a file beside the final file.

    The first line is the command's identity. Every other line contains a row number and the row's
    complete result, so a row is either complete or absent. A last line that was truncated by a kill
    is dropped. At the end, the identity and the request are kept in a record beside the final file.

    If the final file was written by a command with a different identity, it is moved aside. Raises
    DataError if the final file has the same identity or no record, if the journal has a different
    identity, or if a file cannot be written.
    """

    def __init__(self, final: Path, identity: Mapping[str, Any], *, request: str = "") -> None:
        self.final = final
        self.path = part_of(final)
        self._identity: dict[str, Any] = json.loads(json_line(identity))
        self._header = dict(self._identity)
        if request:
            self._header[REQUEST] = request
        self.results: dict[int, list[Any]] = {}
        if is_complete(final):
            self._set_final_file_aside()
        with writing_results(self.path):
            final.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            content = self.path.read_bytes()
        complete, newline, _ = content.rpartition(b"\n")
        if newline:
            header, *results = map(json.loads, complete.split(b"\n"))
            different = differences(header, self._identity)
            if different:
                message = (
                    f"{self.path} contains results of a command with different settings. Use those "
                    "settings, delete the file to start over, or choose another --output_path:"
                )
                raise DataError("\n  ".join([message, *different]))
            self.results.update(results)
        with writing_results(self.path), self.path.open("ab") as file:
            file.truncate(len(complete + newline))
        if not newline:
            self._write(self._header)

    def _set_final_file_aside(self) -> None:
        record = record_of(self.final)
        if not record.exists() or not differences(json.loads(record.read_bytes()), self._identity):
            raise DataError(
                f"--output_path {self.final} already exists. Delete it, or choose another path."
            )
        with writing_results(self.final):
            folder = set_aside(self.final.parent, [self.final.name, record.name])
        notice(
            f"--output_path {self.final} contained results of a different request. Moved them to "
            f"{folder}."
        )

    def add(self, row: int, result: list[Any]) -> None:
        """Write the result of a row."""
        self.results[row] = result
        self._write([row, result])

    def finish(self) -> None:
        """Write the record of the completed final file, and delete the journal."""
        record = record_of(self.final)
        with writing_results(record):
            write_atomically(record, json_line(self._header))
        with writing_results(self.path):
            self.path.unlink()

    def _write(self, content: Any) -> None:
        with writing_results(self.path), self.path.open("ab") as file:
            file.write(json_line(content).encode(errors="replace"))
