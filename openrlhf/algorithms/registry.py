"""Registries: a flag's values, and the function or class for each value."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

Choice = TypeVar("Choice")
Decorated = TypeVar("Decorated")


class Registry(Generic[Choice]):
    """Functions or classes of one kind, by name. Plug-ins register their own at import.

    Each name can be used once. `choices` is the table of a flag's names and their traits, to which
    `register` adds new names. `traits` builds the traits from the properties passed to `register`.
    """

    def __init__(
        self,
        kind: str,
        choices: dict[str, Any] | None = None,
        traits: Callable[..., Any] | None = None,
    ) -> None:
        self.kind, self.choices, self.traits = kind, choices, traits
        self._functions: dict[str, Choice] = {}

    def register(self, name: str, **properties: Any) -> Callable[[Decorated], Decorated]:
        """Return a decorator that registers a function or class under `name`.

        The traits of a name that is already in the table of choices are not changed.
        """

        def decorate(function: Decorated) -> Decorated:
            self.add(name, cast(Any, function))
            if self.choices is not None and self.traits is not None:
                self.choices.setdefault(name, self.traits(**properties))
            return function

        return decorate

    def add(self, name: str, function: Choice) -> None:
        """Register `function` under `name`. Raises ValueError if the name is in use."""
        if name in self._functions:
            raise ValueError(
                f"{self.kind} {name!r} is already registered. Choose a name other than "
                f"{self._known()}"
            )
        self._functions[name] = function

    def __getitem__(self, name: str) -> Choice:
        """Return the function registered under `name`. Raises ValueError, listing known names."""
        if name not in self._functions:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {self._known()}")
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of registration."""
        return iter(self._functions)

    def _known(self) -> str:
        return ", ".join(self._functions)
