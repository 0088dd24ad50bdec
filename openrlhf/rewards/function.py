"""The user's reward function, called in processes that can be killed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RuleConfig
from openrlhf.isolation.pool import ProcessPool, UserCodeError
from openrlhf.reporting import warn_once
from openrlhf.rewards.protocol import Reward, RewardRequest, columns

ARGUMENTS = ("queries", "prompts", "labels")  # arguments of a reward function, in this order
# Parameter names in other frameworks' reward functions, which receive only the response.
RESPONSES = {"completion", "completions", "response", "responses", "output", "outputs"}
NAMEABLE = ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")  # kinds of `inspect.Parameter`


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The names in `ARGUMENTS` accepted by a function, and whether they are passed by name."""

    names: Sequence[str] = ARGUMENTS
    by_name: bool = False
    notice: str = ""  # explains how the function is called, if the user might expect otherwise

    @classmethod
    def for_parameters(cls, parameters: list[list[Any]] | None) -> Self:
        """Pass arguments by name if the function uses the names in `ARGUMENTS`, else by position.

        A parameter is [name, kind, required]. Raises ValueError if the names show that the function
        expects other arguments.
        """
        if parameters is None:
            return cls()
        kinds = [kind for _, kind, _ in parameters]
        required = {name for name, _, is_required in parameters if is_required}
        nameable = [name for name, kind, _ in parameters if kind in NAMEABLE]
        if "VAR_KEYWORD" in kinds:
            nameable += ARGUMENTS
        names = [name for name in ARGUMENTS if name in nameable]
        if "queries" in names and required <= set(names):
            return cls(names=names, by_name=True, notice=_unlabelled(names))
        positional = [name for name, kind, _ in parameters if kind.startswith("POSITIONAL")]
        takes = (
            f"takes ({', '.join(positional)}) but is called with (queries, prompts, labels), "
            "where a query is a prompt followed by its response"
        )
        names = ARGUMENTS[: len(positional)]
        if "VAR_POSITIONAL" in kinds:
            names = ARGUMENTS
        elif len(positional) == 2 and "prompt" not in positional[1]:
            raise ValueError(f"{takes}: rename its parameters to these names")
        for position, name in enumerate(positional):
            is_elsewhere = name in ARGUMENTS and ARGUMENTS.index(name) != position
            if name in RESPONSES or is_elsewhere:
                raise ValueError(f"{takes}: rename its parameters to these names")
        if set(positional) - set(ARGUMENTS):
            return cls(names=names, notice=takes)
        return cls(names=names, notice=_unlabelled(names))

    def of(self, requests: list[RewardRequest]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """Return a call's positional and keyword arguments."""
        given = columns(requests)
        chosen = {name: given[name] for name in self.names}
        if self.by_name:
            return [], chosen
        return list(chosen.values()), {}


def _unlabelled(names: Sequence[str]) -> str:
    if "labels" in names:
        return ""
    return "has no parameter for labels and is called without labels"


class FunctionReward(Reward):
    """The user's `reward_func(queries, prompts, labels)`, run in the processes of `pool`.

    The function is called once per sample with lists of length 1, or, with --reward.batch, once
    with all requests. --reward.timeout limits each call. The function may be `async`, accept
    `**kwargs`, omit `labels`, and return a bare tensor or list of rewards. `function` is the
    function's name in the file.
    """

    def __init__(
        self, rule: RuleConfig, pool: ProcessPool, *, function: str = "reward_func"
    ) -> None:
        assert rule.function_path
        self.source = f"{Path(rule.function_path).resolve()}:{function}"
        self.pool = pool
        self.timeout = rule.timeout
        self.batch = rule.batch
        self._arguments: Arguments | None = None

    async def check(self) -> None:
        """Load the user's file in a process.

        Raises ConfigError with the traceback if loading fails.
        """
        try:
            await self._learn_arguments()
        except UserCodeError as error:
            raise ConfigError(f"--reward.remote_url: {error}") from error
        except ValueError as error:
            raise ConfigError(f"--reward.remote_url: {self.source} {error}") from error

    async def ask(self, requests: list[RewardRequest]) -> Any:
        """Return the function's return value for these requests."""
        args, kwargs = (await self._learn_arguments()).of(requests)
        return await self.pool.call(self.source, *args, timeout=self.timeout, **kwargs)

    async def _learn_arguments(self) -> Arguments:
        if self._arguments is None:
            self._arguments = Arguments.for_parameters(await self.pool.check(self.source))
            if notice := self._arguments.notice:
                warn_once(f"{self.source} {notice}.")
        return self._arguments
