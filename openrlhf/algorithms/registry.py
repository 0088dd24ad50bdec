"""Choices by name: what a flag may be set to, and what stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Choice = TypeVar("Choice")


class Registry(Generic[Choice]):
    """The registered choices of one kind. Plug-ins add to it at import; a name is taken once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._choices: dict[str, Choice] = {}

    def register(self, name: str) -> Callable[[Choice], Choice]:
        """A decorator that registers what it decorates under `name`."""

        def decorate(choice: Choice) -> Choice:
            self.add(name, choice)
            return choice

        return decorate

    def add(self, name: str, choice: Choice) -> None:
        """Register `choice` under `name`. Raises ValueError when the name is taken."""
        if name in self._choices:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose a name other than {self._known()}")
        self._choices[name] = choice

    def __getitem__(self, name: str) -> Choice:
        """The choice of that name. Raises ValueError with the known names when there is none."""
        if name not in self._choices:
            raise ValueError(f"there is no {self.kind} {name!r}; known are {self._known()}")
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of registration."""
        return iter(self._choices)

    def __contains__(self, name: object) -> bool:
        return name in self._choices

    def _known(self) -> str:
        return ", ".join(self._choices)
