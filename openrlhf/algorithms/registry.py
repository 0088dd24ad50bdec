"""Registries: the values of a flag, and the function or class of each value."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Choice = TypeVar("Choice")
Decorated = TypeVar("Decorated")


class Registry(Generic[Choice]):
    """Choices of one kind by name. Plug-ins register choices at import. Each name can be used once.

    `entry` builds a choice from the registered function and its properties. Without `entry`, the
    registered function or class is the choice.
    """

    def __init__(self, kind: str, entry: Callable[..., Choice] | None = None) -> None:
        self.kind, self.entry = kind, entry
        self._choices: dict[str, Choice] = {}

    def register(self, name: str, **properties: Any) -> Callable[[Decorated], Decorated]:
        """Return a decorator that registers a function or class under `name`, with the properties
        of the choice.
        """

        def decorate(function: Decorated) -> Decorated:
            choice: Any = function
            if self.entry:
                choice = self.entry(function, **properties)
            self.add(name, choice)
            return function

        return decorate

    def add(self, name: str, choice: Choice) -> None:
        """Register `choice` under `name`. Raises ValueError if the name is in use."""
        if name in self._choices:
            raise ValueError(
                f"{self.kind} {name!r} is already registered; choose a name other than "
                f"{self._known()}"
            )
        self._choices[name] = choice

    def __getitem__(self, name: str) -> Choice:
        """Return the choice with a name. Raises ValueError with the known names if none has it."""
        if name not in self._choices:
            raise ValueError(f"there is no {self.kind} {name!r}; known: {self._known()}")
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of registration."""
        return iter(self._choices)

    def _known(self) -> str:
        return ", ".join(self._choices)
