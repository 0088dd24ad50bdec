"""OpenAI-compatible servers that the run did not start, for agents and reward functions.

User code selects these servers by name. The process that starts user processes stores the names and
URLs in its environment, which user processes inherit.

The `openai` client is not used: its timeout limits each read instead of the entire attempt, it does
not support URLs with query parameters, and importing it takes 0.8 s of CPU time per user process.
"""

import asyncio
import json
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.event_loop import EventLoopThread
from openrlhf.rewards.servers import HTTPServers, ServerError

FLAG = "--rollout.remote_engines"
VARIABLE = "OPENRLHF_REMOTE_ENGINES"
T = TypeVar("T")


def offer_engines(rollout: RemoteEnginesConfig, reward: RuleConfig) -> None:
    """Wait for all remote engines, then make them available to future user processes.

    Raises ConfigError.
    """
    urls = dict(rollout.named_engines)
    if urls:  # creating a client without need would take 0.1 s
        servers = HTTPServers(list(urls.values()), reward, kind="remote engine", flag=FLAG)
        asyncio.run(servers.check())
    offered = {"urls": urls, "timeout": reward.timeout, "retries": reward.retries}
    os.environ[VARIABLE] = json.dumps(offered)


class RemoteEngine:
    """A client for one server.

    `model` is the name of a model on the server; None selects the first model listed by the server.
    `parameters` are OpenAI API parameters. Methods raise ServerError if the server is down or slow,
    rejects the request, or returns an unexpected response. Methods ending in `_sync` are for
    synchronous code and may be called from any thread. All requests of a process share connections.
    """

    def __init__(
        self,
        url: str,
        rule: RuleConfig,
        *,
        model: str | None = None,
        key: str | None = None,
        **names: str,
    ) -> None:
        """Create a client for the server at this URL.

        The API key is `key`, or else OPENAI_API_KEY. `names` are arguments of `HTTPServers`.
        """
        key = key or os.environ.get("OPENAI_API_KEY")
        self.servers = HTTPServers([url.rstrip("/")], rule, key=key, **names)
        self._model = model
        # first model listed by the server; reset if the server rejects a request
        self._first: str | None = None

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """Return the text of the reply to a conversation."""
        answered = await self.ask("/chat/completions", {"messages": list(messages), **parameters})
        return self.read(answered, "choices", 0, "message", "content", kind=str)

    async def completion(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """Return the completion of a prompt that is given as text or as token ids."""
        answered = await self.ask("/completions", {"prompt": prompt, **parameters})
        return self.read(answered, "choices", 0, "text", kind=str)

    def chat_sync(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """Call `chat` and wait for its result."""
        return in_background(self.chat(messages, **parameters)).result()

    def completion_sync(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """Call `completion` and wait for its result."""
        return in_background(self.completion(prompt, **parameters)).result()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Add the model's name to `body`, send it and return the response. Raises ServerError."""
        if "model" not in body:
            if not (self._model or self._first):
                self._first = await self._listed("id", kind=str)
            body = {"model": self._model or self._first, **body}
        return await self._answer(body, path)

    async def room(self) -> int | None:
        """Return the maximum number of tokens in a request and its response together.

        Returns None if the server does not report this limit. (vLLM reports the limit.)
        """
        return (await self._listed(kind=dict)).get("max_model_len")

    async def _listed(self, *path: str, kind: type[T]) -> T:
        """Return a field of the first model listed by the server."""
        return self.read(await self._answer(None, "/models"), "data", 0, *path, kind=kind)

    async def _answer(self, body: Mapping[str, Any] | None, path: str) -> Any:
        try:
            return await asyncio.wrap_future(in_background(self.servers.send(body, path)))
        except ValueError as error:
            self._first = None  # the server may serve a different model by now
            raise ServerError(f"{self.servers.kind} {error}") from error

    def read(self, answered: Any, *path: str | int, kind: type[T]) -> T:
        """Return the value at a path in a response. Raises ServerError if the value is missing."""
        found = answered
        with suppress(KeyError, IndexError, TypeError):
            for step in path:
                found = found[step]
            if isinstance(found, kind):
                return found
        raise ServerError(
            f"{self.servers.kind} {self.servers.servers[0].name} returned no {kind.__name__} at "
            f"{'.'.join(map(str, path))}: {str(answered)[:200]!r}"
        )


def remote_engine(
    name: str, model: str | None = None, *, timeout: float | None = None, key: str | None = None
) -> RemoteEngine:
    """Return the engine with this name from --rollout.remote_engines, or raise LookupError.

    `timeout` (seconds) limits each attempt and defaults to --reward.timeout. The API key is `key`,
    or else OPENAI_API_KEY.
    """
    offered = json.loads(os.environ.get(VARIABLE, '{"urls": {}}'))
    if name not in offered["urls"]:
        known = ", ".join(offered["urls"]) or "none"
        raise LookupError(f"{FLAG} has no engine {name!r}; available engines: {known}")
    rule = RuleConfig(timeout=timeout or offered["timeout"], retries=offered["retries"])
    return _engine(offered["urls"][name], model, rule, key, os.getpid())


@cache
def _engine(
    url: str, model: str | None, rule: RuleConfig, key: str | None, process: int
) -> RemoteEngine:
    """Return the engine, which is shared by identical calls in a process.

    Forks do not inherit threads.
    """
    return RemoteEngine(url, rule, model=model, key=key, kind="remote engine", flag=FLAG)


@cache
def _loop(process: int) -> EventLoopThread:
    """Return a process's event loop for requests."""
    return EventLoopThread("remote engines")


def in_background(asked: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the process's event loop for requests."""
    return _loop(os.getpid()).submit(asked)
