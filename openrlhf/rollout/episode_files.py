"""Generated and rewarded episodes, stored on disk.

--rollout.dump_dir writes these files, and --rollout.replay_dir reads them:

    step-000007.jsonl.gz    the episodes of step 7, in prompt order
    eval-000006.jsonl.gz    the evaluation episodes of the weights after step 6
    earlier/<n>/            files that an earlier run left in the folder

The first line of a file is a header: {"format": 1, "kind": "step", "step": 7, "episodes": 64,
"run": {…}}. Every other line is a `Trajectory`, keyed by field name. Numbers are stored exactly.
Labels that are JSON serializable are also stored exactly; any other label (bytes, dates, images) is
stored as text.
"""

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import Tensor

from openrlhf.core.trajectory import Trajectory
from openrlhf.data.errors import DataError
from openrlhf.files import write_atomically
from openrlhf.masking import hide
from openrlhf.observability.run_folder import set_aside

FORMAT = 1
EPISODE = TypeAdapter(Trajectory)
FILE = re.compile(r"(?P<kind>step|eval)-(?P<step>\d+)\.jsonl\.gz")
DAMAGE = (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError)
Kind = Literal["step", "eval"]


class EpisodeFolder:
    """A run's episode files, each written completely or not at all.

    Reading a damaged file raises a DataError that names the file and the line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def file(self, kind: Kind, step: int) -> Path:
        """Return the path of the episode file of a training step or an evaluation."""
        return self.path / f"{kind}-{step:06}.jsonl.gz"

    def steps(self) -> list[int]:
        """Return the training steps that have a file, in order."""
        return sorted(int(file["step"]) for file in self._files() if file["kind"] == "step")

    @property
    def last_step(self) -> int:
        """The last training step with a file; 0 if there is none."""
        return max(self.steps(), default=0)

    def _files(self) -> list[re.Match[str]]:
        """Match the names of the folder's files against `FILE`, and return the matches."""
        matches = [FILE.fullmatch(path.name) for path in self.path.glob("*.jsonl.gz")]
        return [match for match in matches if match]

    def begin(self, *, after: int) -> None:
        """Prepare the folder for a run that continues after step `after` (-1 for a new run).

        Files of later steps are moved to earlier/<n>/.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        set_aside(self.path, [file[0] for file in self._files() if int(file["step"]) > after])

    def write(
        self, kind: Kind, step: int, episodes: Sequence[Trajectory], *, run: Mapping[str, Any]
    ) -> None:
        """Write or replace a file. A run that replays the file must have the identity `run`."""
        header = {
            "format": FORMAT,
            "kind": kind,
            "step": step,
            "episodes": len(episodes),
            "run": run,
        }
        lines = [json.dumps(header, default=_plain)]
        for episode in episodes:
            row = EPISODE.dump_python(episode) | {"error": hide(episode.error)}
            lines.append(json.dumps(row, default=_plain))
        text = "\n".join(lines) + "\n"
        data = gzip.compress(text.encode(), compresslevel=1, mtime=0)
        write_atomically(self.file(kind, step), [data])

    def header(self, kind: Kind, step: int) -> dict[str, Any]:
        """Return the number of `episodes` in a file and the `run` that was passed to `write`."""
        path = self.file(kind, step)
        try:
            with gzip.open(path) as file:
                header = json.loads(file.readline())
            if header["format"] != FORMAT:
                raise ValueError(
                    f"the file has format {header['format']}, but this version of the program "
                    f"reads format {FORMAT}"
                )
            return {"episodes": header["episodes"], "run": header["run"]}
        except DAMAGE as error:
            raise _damaged(path, 1, error) from error

    def read(self, kind: Kind, step: int) -> list[Trajectory]:
        """Return the episodes stored in a file."""
        path = self.file(kind, step)
        expected = self.header(kind, step)["episodes"]
        episodes: list[Trajectory] = []
        try:
            with gzip.open(path) as file:
                next(file)
                for line in file:
                    episodes.append(EPISODE.validate_python(json.loads(line)))
            if len(episodes) != expected:
                raise ValueError(f"the file ends after {len(episodes)} of {expected} episodes")
        except DAMAGE as error:
            raise _damaged(path, len(episodes) + 2, error) from error
        return episodes


def _damaged(path: Path, line: int, error: Exception) -> DataError:
    return DataError(
        f"{path}, line {line}, cannot be read: {type(error).__name__}: {error}. Copy the original "
        "file again, or write it again with --rollout.dump_dir."
    )


def _plain(value: object) -> Any:
    if isinstance(value, array | Tensor):
        return value.tolist()
    return str(value)
