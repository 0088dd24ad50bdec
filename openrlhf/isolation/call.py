"""A call to user code: its function, its limits and its errors."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openrlhf.core.trajectory import Failure


@dataclass(frozen=True)
class Asked:
    """A call's question to the pool's owner, with its answer."""

    question: Any
    answer: Any
    # False if other code in the process may have asked this question during the call.
    own: bool


class UserCodeError(RuntimeError):
    """Error for a failed call to user code.

    The call raised an exception, timed out, ended its process, or returned a value that cannot be
    serialized. The message contains the traceback.
    """

    def __init__(self, message: str, failure: Failure = Failure.EXCEPTION) -> None:
        super().__init__(message)
        self.failure = failure


class ProcessLost(UserCodeError):
    """Error raised for a call whose process has ended.

    `again` states where the call may be retried, or is None if the call itself killed the process.
    """

    def __init__(self, error: UserCodeError, again: Literal["anywhere", "alone"] | None) -> None:
        super().__init__(str(error), error.failure)
        self.again = again


@dataclass(frozen=True, kw_only=True)
class UserCall:
    """A user function, its arguments and its deadlines.

    `limit` names the flag that sets `seconds`, for use in error messages. `answer` is called with a
    question's index and the question itself. `asked` collects questions and answers, even if the
    call fails.
    """

    name: str  # name of the call in messages
    target: str  # path/to/file.py:function or package.module:function
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    seconds: float  # time limit for the call's own work; restarts after each answer
    limit: str
    total_seconds: float | None = None  # time limit that includes waiting for answers
    total_limit: str = ""
    answer: Callable[[int, Any], Awaitable[Any]] | None = None
    asked: list[Asked] = field(default_factory=list, compare=False)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one user process."""

    memory_gib: float
    at_once: int  # concurrent calls
    # seconds that a late call is given to end before its process is killed
    grace: float
