"""Choices by name: the values of a flag, and the function or class behind each value."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Choice = TypeVar("Choice")
Decorated = TypeVar("Decorated")


class Registry(Generic[Choice]):
    """The registered choices of one kind. Plug-ins add choices at import. A name can be used once.

    `entry` makes a choice of the function that is registered, and of its properties; without it, what is registered is one.
    """

    def __init__(self, kind: str, entry: Callable[..., Choice] | None = None) -> None:
        self.kind, self.entry = kind, entry
        self._choices: dict[str, Choice] = {}

    def register(self, name: str, **properties: Any) -> Callable[[Decorated], Decorated]:
        """A decorator that registers a function or class under `name`, with the properties that such a choice has."""

        def decorate(choice: Decorated) -> Decorated:
            made: Any = self.entry(choice, **properties) if self.entry else choice
            self.add(name, made)
            return choice

        return decorate

    def add(self, name: str, choice: Choice) -> None:
        """Register `choice` under `name`. Raises ValueError if the name is in use."""
        if name in self._choices:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose a name other than {self._known()}")
        self._choices[name] = choice

    def __getitem__(self, name: str) -> Choice:
        """The choice of that name. Raises ValueError with the known names if there is none."""
        if name not in self._choices:
            raise ValueError(f"there is no {self.kind} {name!r}; known are {self._known()}")
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of registration."""
        return iter(self._choices)

    def _known(self) -> str:
        return ", ".join(self._choices)
