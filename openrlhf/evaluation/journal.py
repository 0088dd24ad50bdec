"""The results of a long command on disk as soon as they are there, so that a killed command continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.checkpoints.manifest import differences
from openrlhf.data.errors import DataError
from openrlhf.observability.run_folder import json_line


class Journal:
    """Results by row number, in a file beside the final one.

    The first line is the identity of the command. Each other line has a row and its whole result, so a row is there once
    or not at all. A last line that a kill has cut is dropped. Raises DataError if the final file is there already, or
    if a command with another identity began the results.
    """

    def __init__(self, final: Path, identity: Mapping[str, Any]) -> None:
        self.final, self.path = final, final.with_name(f"{final.name}.part")
        if final.exists() and not self.path.exists():
            raise DataError(f"--output_path {final} is there already: delete it, or give another path.")
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        whole, newline, _ = self.path.read_bytes().rpartition(b"\n")
        here = json_line(identity)
        there, *lines = map(json.loads, whole.split(b"\n") if newline else [here])
        if different := differences(there, json.loads(here)):
            raise DataError(
                f"{self.path} was begun with other settings. Go on with those, or delete it to begin anew, or give another "
                "--output_path:" + "".join(f"\n  {difference}" for difference in different)
            )
        self.results: dict[int, list[Any]] = dict(lines)
        with self.path.open("ab") as file:
            file.truncate(len(whole + newline))
        if not newline:
            self._write(identity)

    def add(self, row: int, result: list[Any]) -> None:
        """Write the result of a row."""
        self.results[row] = result
        self._write([row, result])

    def _write(self, content: Any) -> None:
        with self.path.open("ab") as file:
            file.write(json_line(content).encode(errors="replace"))
