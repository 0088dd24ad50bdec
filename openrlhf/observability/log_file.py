"""An append-only text file that tolerates a full disk."""

from pathlib import Path

from openrlhf.reporting import notice
from openrlhf.units import MIB

MAX_PENDING_BYTES = 64 * MIB


class LogFile:
    """An append-only text file. A failed write is reported once and never raised.

    Bytes that could not be written, for example because the disk is full, are buffered and written
    before the next line. At most 64 MiB are buffered; further lines are dropped until there is room
    in the buffer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # The file is unbuffered, so a killed process loses at most the line that it was writing.
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._has_failed = False

    def write(self, line: str) -> None:
        """Append a line, which must end with a line break."""
        self._flush()
        if len(self._pending) < MAX_PENDING_BYTES:
            self._pending += line.encode("utf-8", errors="replace")
            self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                written = self._file.write(self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            if not self._has_failed:
                report_failed_write(self.path, error)
            self._has_failed = True
        else:
            self._has_failed = False

    def close(self) -> None:
        """Try to write the pending lines, then close the file."""
        self._flush()
        self._file.close()


def report_failed_write(path: Path, error: OSError) -> None:
    """Report that a file in the run folder could not be written and that the run continues."""
    reason = error.strerror or error
    notice(
        f"Cannot write {path}: {reason}. Training continues. Free disk space so that logging can "
        "resume."
    )
