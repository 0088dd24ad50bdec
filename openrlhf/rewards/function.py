"""The user's reward function, called in processes that can be killed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RuleConfig
from openrlhf.isolation.pool import ProcessPool, UserCodeError
from openrlhf.observability.once import warn_once
from openrlhf.rewards.protocol import Reward, RewardRequest, columns

ARGUMENTS = ("queries", "prompts", "labels")  # what a reward function is called with, in this order
# Parameters of other trainers' functions, which are given a response alone.
RESPONSES = {"completion", "completions", "response", "responses", "output", "outputs"}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Which of `ARGUMENTS` a function takes, and whether it is called with them by name."""

    names: tuple[str, ...]
    by_name: bool
    notice: str = ""  # what its author may not expect

    @classmethod
    def for_parameters(cls, parameters: list[list[Any]] | None) -> Self:
        """By name if the function uses our names, else by position. Parameters are [name, kind,
        required].

        Raises ValueError if the names say that the function expects something else.
        """
        if parameters is None:
            return cls(names=ARGUMENTS, by_name=False)
        kinds = {kind for _, kind, _ in parameters}
        nameable = {
            name
            for name, kind, _ in parameters
            if kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
        }
        names = tuple(name for name in ARGUMENTS if name in nameable or "VAR_KEYWORD" in kinds)
        required = {name for name, _, required in parameters if required}
        unlabelled = "takes no labels, and gets none"
        if "queries" in names and required <= set(names):
            return cls(names=names, by_name=True, notice="" if "labels" in names else unlabelled)
        places = [name for name, kind, _ in parameters if kind.startswith("POSITIONAL")]
        moved = [
            name
            for place, name in enumerate(places)
            if name in ARGUMENTS and ARGUMENTS.index(name) != place
        ]
        takes = f"takes ({', '.join(places)}), but is called with (queries, prompts, labels), a query being prompt and response"
        without_labels = len(places) == 2 and "VAR_POSITIONAL" not in kinds
        if moved or RESPONSES & set(places) or (without_labels and "prompt" not in places[1]):
            raise ValueError(f"{takes}: give its parameters these names")
        names = ARGUMENTS if "VAR_POSITIONAL" in kinds else ARGUMENTS[: len(places)]
        foreign = set(places) - set(ARGUMENTS)
        return cls(
            names=names,
            by_name=False,
            notice=takes if foreign else "" if len(names) == 3 else unlabelled,
        )

    def of(self, requests: list[RewardRequest]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """The positional and the keyword arguments of a call."""
        given = columns(requests)
        chosen = {name: given[name] for name in self.names}
        return ([], chosen) if self.by_name else (list(chosen.values()), {})


class FunctionReward(Reward):
    """The user's `reward_func(queries, prompts, labels)`, run in the processes of `pool`.

    It gets lists of length 1, one call per sample, or with --reward.batch all requests at once;
    --reward.timeout bounds each call. It may be `async`, take `**kwargs`, do without `labels`, and
    return a bare tensor or list of rewards. `function` is its name in the file.
    """

    def __init__(
        self, rule: RuleConfig, pool: ProcessPool, *, function: str = "reward_func"
    ) -> None:
        assert rule.function_path
        self.source = f"{Path(rule.function_path).resolve()}:{function}"
        self.pool, self.timeout, self.batch = pool, rule.timeout, rule.batch
        self._arguments: Arguments | None = None

    async def check(self) -> None:
        """Load the file in a process. Raises ConfigError, with the traceback if that fails."""
        try:
            await self._learn_arguments()
        except UserCodeError as error:
            raise ConfigError(f"--reward.remote_url: {error}") from error
        except ValueError as error:
            raise ConfigError(f"--reward.remote_url: {self.source} {error}") from error

    async def ask(self, requests: list[RewardRequest]) -> Any:
        """What the function returns for these requests."""
        args, kwargs = (await self._learn_arguments()).of(requests)
        returned = await self.pool.call(self.source, *args, timeout=self.timeout, **kwargs)
        if not isinstance(returned, Mapping):
            warn_once(
                f"{self.source} returns rewards alone; a dict with rewards, scores and extra_logs can say more."
            )
        return returned

    async def _learn_arguments(self) -> Arguments:
        if self._arguments is None:
            self._arguments = Arguments.for_parameters(await self.pool.check(self.source))
            if notice := self._arguments.notice:
                warn_once(f"{self.source} {notice}.")
        return self._arguments
