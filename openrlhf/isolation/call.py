"""A call of user code: what runs, what bounds it, and how it can fail."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openrlhf.core.trajectory import Failure


@dataclass(frozen=True)
class Asked:
    """A question of a call to the pool's owner, and the answer."""

    question: Any
    answer: Any
    # False: asked from elsewhere in the process during the call, perhaps on its behalf
    own: bool


class UserCodeError(RuntimeError):
    """User code raised, took too long, ended its process, or returned what cannot leave it; the
    message has the traceback.
    """

    def __init__(self, message: str, failure: Failure = Failure.EXCEPTION) -> None:
        super().__init__(message)
        self.failure = failure


class ProcessLost(UserCodeError):
    """The process of a call is gone.

    `again` is where the call may run once more; None if this call itself killed the process.
    """

    def __init__(self, error: UserCodeError, again: Literal["anywhere", "alone"] | None) -> None:
        super().__init__(str(error), error.failure)
        self.again = again


@dataclass(frozen=True, kw_only=True)
class UserCall:
    """A function of the user, its arguments, and its deadlines. `limit` is the flag behind
    `seconds`, for messages.

    `answer` gets the number of a question and the question. Questions and answers are kept in
    `asked`, those of a failed call too.
    """

    name: str  # in messages
    target: str  # path/to/file.py:function or package.module:function
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    seconds: float  # of its own work, between two answers
    limit: str
    total_seconds: float | None = None  # of all, waiting for answers included
    total_limit: str = ""
    answer: Callable[[int, Any], Awaitable[Any]] | None = None
    asked: list[Asked] = field(default_factory=list[Asked], compare=False)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a process. `grace`: seconds for a call to end after its deadline, before its
    process is killed.
    """

    memory_gib: float
    at_once: int  # calls
    grace: float
