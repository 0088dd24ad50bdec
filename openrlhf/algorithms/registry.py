"""Choices by name: the values of a flag, and the function or class behind each value."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Choice = TypeVar("Choice")
Decorated = TypeVar("Decorated")


class Registry(Generic[Choice]):
    """The registered choices of one kind. Plug-ins add choices at import. A name can be used once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._choices: dict[str, Choice] = {}

    def register(
        self, name: str, entry: Callable[[Any], Choice] = lambda choice: choice
    ) -> Callable[[Decorated], Decorated]:
        """A decorator that registers under `name` a function or class, or the `entry` that is made of it."""

        def decorate(choice: Decorated) -> Decorated:
            self.add(name, entry(choice))
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
