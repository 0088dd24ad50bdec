"""The results of a long command on disk as soon as they are there, so that a killed command continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.checkpoints.manifest import differences
from openrlhf.config.flags import UserError
from openrlhf.observability.run_folder import json_line


class JournalError(UserError, ValueError):
    """The results on disk are complete, or of another command."""


class Journal:
    """Results by row number, in a file beside the final one.

    The first line is the identity of the command. Each other line has a row and its whole result, so a row is there once
    or not at all. A last line that a kill has cut is dropped. Raises JournalError if the final file is there already, or
    if a command with another identity began the results.
    """

    def __init__(self, final: Path, identity: Mapping[str, Any]) -> None:
        self.final, self.path = final, final.with_name(f"{final.name}.part")
        if final.exists() and not self.path.exists():
            raise JournalError(f"--output_path {final} is there already: delete it, or give another path.")
        final.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.read_bytes() if self.path.exists() else b""
        *lines, unfinished = written.split(b"\n")
        begun = json.loads(lines[0]) if lines else identity
        if different := differences(begun, json.loads(json_line(identity))):
            raise JournalError(
                f"{self.path} was begun with other settings. Go on with those, or delete it to begin anew, or give another "
                "--output_path:" + "".join(f"\n  {difference}" for difference in different)
            )
        self.results: dict[int, list[Any]] = dict(map(json.loads, lines[1:]))
        self._file = self.path.open("ab")
        self._file.truncate(len(written) - len(unfinished))
        if not lines:
            self._write(identity)

    def add(self, row: int, result: list[Any]) -> None:
        """Write the result of a row."""
        self.results[row] = result
        self._write([row, result])

    def _write(self, content: Any) -> None:
        self._file.write(json_line(content).encode(errors="replace"))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
