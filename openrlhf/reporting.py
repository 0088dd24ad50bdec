"""The only module that prints messages to the user who started a command.

| call | where the text goes | who writes it |
|---|---|---|
| `say` | standard output: results and progress | this process |
| `notice` | standard error, `[notice] …`: something the user may want to change | rank 0 of a
launcher | | `warn` | standard error, `[warning] …`: something failed, but the run continues | this
process |
| `warn_once` | like `warn` | this process, once per sentence |
| `alert` | standard error, unmarked: why a command exits or restarts | this process |

Ray workers and user-code processes write to their log files. Passwords and tokens in URLs are
masked on standard error. Lines about a run's steps are printed by `observability.display`, which
handles --run.quiet and --run.json. Standard library only.
"""

import os
import sys
from functools import cache

from openrlhf.masking import without_secrets

NOTICE = "[notice]"
notices: list[str] = []  # all notices that this process has printed


def is_first() -> bool:
    """Return whether this process is rank 0 of its launcher; True without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str, end: str = "\n") -> None:
    """Print results to standard output.

    `end` is printed after the last line.
    """
    print(*lines, sep="\n", end=end, flush=True)


def alert(text: str) -> None:
    """Print text to standard error, with secrets masked."""
    print(without_secrets(text), file=sys.stderr, flush=True)


def notice(*sentences: str) -> None:
    """Print notices for the user. Only rank 0 of a launcher prints notices."""
    if is_first():
        for sentence in sentences:
            alert(f"{NOTICE} {sentence}")
            notices.append(without_secrets(sentence))


def warn(sentence: str) -> None:
    """Print a warning about this process."""
    alert(f"[warning] {sentence}")


@cache
def warn_once(sentence: str) -> None:
    """Print a warning, unless this process has already printed it."""
    warn(sentence)
