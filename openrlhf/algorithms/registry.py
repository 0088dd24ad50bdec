"""Registries, which map each value of a flag to a function or class."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

Choice = TypeVar("Choice")
Decorated = TypeVar("Decorated")


class Registry(dict[str, Choice]):
    """Functions or classes of one kind, by name.

    A plug-in registers its functions or classes when it is imported.

    Each name can be used once. `choices` maps a flag's valid names to their traits; `register` adds
    new names to this mapping. `traits` builds the traits from the properties passed to `register`.
    """

    def __init__(
        self,
        kind: str,
        choices: dict[str, Any] | None = None,
        traits: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.choices, self.traits = kind, choices, traits

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
        if name in self:
            raise ValueError(
                f"{self.kind} {name!r} is already registered. Choose a name other than "
                f"{', '.join(self)}"
            )
        self[name] = function

    def __missing__(self, name: str) -> Choice:
        raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self)}")
