"""The results of a long command on disk as soon as they are there, so that a killed command
continues.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.checkpoints.manifest import differences
from openrlhf.config.flags import notice
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import FirstStart
from openrlhf.files import write_atomically
from openrlhf.observability.run_folder import json_line, set_aside

REQUEST = "request, before its rows were rendered"  # an entry beside an identity


def start_of_results(final: Path) -> FirstStart:
    """Return the first start of the command that wrote the file or began to; else that of this
    command.
    """
    for begun in (part_of(final), record_of(final)):
        if begun.exists():
            with suppress(ValueError):
                return FirstStart.of(json.loads(begun.read_bytes().partition(b"\n")[0]))
    return FirstStart.here()


def part_of(final: Path) -> Path:
    """Return the file with the results so far."""
    return final.with_name(f"{final.name}.part")


def is_complete(final: Path) -> bool:
    """Return whether the final file exists, and there are no partial results to continue."""
    return final.exists() and not part_of(final).exists()


def record_of(final: Path) -> Path:
    """Return the file with the identity of the command that wrote the final file."""
    return final.with_name(f"{final.name}.request")


def request_of(final: Path) -> str | None:
    """Return the request that wrote the final file; "" if an older release wrote it, None without a
    record.
    """
    record = record_of(final)
    if not record.exists():
        return None
    return str(json.loads(record.read_bytes()).get(REQUEST, ""))


def has_another_request(final: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether the final file exists, is complete, and is known to belong to another request."""
    if not is_complete(final):
        return False
    record = record_of(final)
    made = json.loads(record.read_bytes()) if record.exists() else {}
    return bool(differences(made, json.loads(json_line(identity))))


class Journal:
    """Results by row number, in a file beside the final one.

    The first line is the identity of the command. Each other line has a row and its whole result,
    so a row is complete or absent. A last line that was cut off by a kill is dropped. At the end
    the identity stays beside the final file. A final file of a command with another identity is
    moved aside. `request` is kept beside the identity, for `request_of`. Raises DataError if a
    final file of this identity, or one of unknown origin, already exists, or if a command with
    another identity began the results.
    """

    def __init__(self, final: Path, identity: Mapping[str, Any], *, request: str = "") -> None:
        self.final, self.path = final, part_of(final)
        self.identity, self.record = json.loads(json_line(identity)), record_of(final)
        self.request = {REQUEST: request} if request else {}
        if is_complete(final):
            if not has_another_request(final, identity):
                raise DataError(
                    f"--output_path {final} is there already: delete it, or give another path."
                )
            aside = set_aside(final.parent, [final.name, self.record.name])
            notice(
                f"--output_path {final} had the results of another request, which are now in {aside}."
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        whole, newline, _ = self.path.read_bytes().rpartition(b"\n")
        there, *lines = map(json.loads, whole.split(b"\n") if newline else [json_line(identity)])
        if different := differences(there, self.identity):
            advice = "Go on with those, or delete it to begin anew, or give another --output_path:"
            raise DataError(
                "\n  ".join([f"{self.path} was begun with other settings. {advice}", *different])
            )
        self.results: dict[int, list[Any]] = dict(lines)
        with self.path.open("ab") as file:
            file.truncate(len(whole + newline))
        if not newline:
            self._write(self.identity | self.request)

    def add(self, row: int, result: list[Any]) -> None:
        """Write the result of a row."""
        self.results[row] = result
        self._write([row, result])

    def finish(self) -> None:
        """Keep the identity of the final file, which is written, and delete the results."""
        write_atomically(self.record, json_line(self.identity | self.request))
        self.path.unlink()

    def _write(self, content: Any) -> None:
        with self.path.open("ab") as file:
            file.write(json_line(content).encode(errors="replace"))
