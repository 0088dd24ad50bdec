"""OpenAI-compatible servers that were not started here: agents and reward functions ask them by
name.

The process that starts user processes leaves names and URLs in its environment, which they inherit.
"""

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, Self, TypeVar

from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.rewards.servers import HTTPServers, ServerError

FLAG = "--rollout.remote_engines"
VARIABLE = "OPENRLHF_REMOTE_ENGINES"
T = TypeVar("T")


def offer_engines(rollout: RemoteEnginesConfig, reward: RuleConfig) -> None:
    """Tell user processes that start from now on the names of the remote engines, once all engines
    answer. Raises ConfigError.
    """
    urls, limits = (
        dict(rollout.named_engines),
        {"timeout": reward.timeout, "retries": reward.retries},
    )
    asyncio.run(HTTPServers(list(urls.values()), reward, kind="remote engine", flag=FLAG).check())
    os.environ[VARIABLE] = json.dumps({"urls": urls, **limits})


class RemoteEngine:
    """One server. `model`: the name of a model there; None asks the server for the first;
    `parameters` are those of the OpenAI API.

    Methods raise ServerError if the server is gone, slow, refuses, or answers something else.
    Methods with names in `_sync` are for code that is not async; they may be called from any
    thread. Requests of a process share their connections.
    """

    def __init__(self, servers: HTTPServers, model: str | None = None) -> None:
        self.servers, self._model = servers, model
        self._first: str | None = None  # in the server's list, until the server refuses something

    @classmethod
    def at(
        cls,
        url: str,
        rule: RuleConfig,
        *,
        model: str | None = None,
        key: str | None = None,
        **names: str,
    ) -> Self:
        """The server at this URL. `key`, or else OPENAI_API_KEY, goes along; `names` are those of
        `HTTPServers`.
        """
        return cls(
            HTTPServers(
                [url.rstrip("/")], rule, key=key or os.environ.get("OPENAI_API_KEY"), **names
            ),
            model,
        )

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """The text of the reply to a conversation."""
        answered = await self.ask("/chat/completions", {"messages": list(messages), **parameters})
        return self.read(answered, "choices", 0, "message", "content", kind=str)

    async def completion(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """The text that follows a prompt, given as text or as tokens."""
        answered = await self.ask("/completions", {"prompt": prompt, **parameters})
        return self.read(answered, "choices", 0, "text", kind=str)

    def chat_sync(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """`chat`, waited for."""
        return in_background(self.chat(messages, **parameters)).result()

    def completion_sync(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """`completion`, waited for."""
        return in_background(self.completion(prompt, **parameters)).result()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """What the server answers to `body`, with a model's name in it. Raises ServerError."""
        if "model" not in body:
            if not (self._model or self._first):
                self._first = await self._listed("id", kind=str)
            body = {"model": self._model or self._first, **body}
        return await self._answer(body, path)

    async def room(self) -> int | None:
        """Tokens that a request and its answer may have together; None if the server does not say;
        vLLM does.
        """
        return (await self._listed(kind=dict)).get("max_model_len")

    async def _listed(self, *path: str, kind: type[T]) -> T:
        """What the server says of the first model in its list."""
        return self.read(await self._answer(None, "/models"), "data", 0, *path, kind=kind)

    async def _answer(self, body: Mapping[str, Any] | None, path: str) -> Any:
        try:
            return await asyncio.wrap_future(in_background(self.servers.ask(body, path)))
        except ValueError as error:
            self._first = None  # it may serve another by now
            raise ServerError(f"{self.servers.kind} {error}") from error

    def read(self, answered: Any, *path: str | int, kind: type[T]) -> T:
        """What is at a place in an answer. Raises ServerError if there is no such thing."""
        found = answered
        try:
            for step in path:
                found = found[step]
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, kind):
            place = ".".join(map(str, path))
            servers = self.servers
            raise ServerError(
                f"{servers.kind} {servers.servers[0].name} sent no {kind.__name__} at {place}: {str(answered)[:200]!r}"
            )
        return found


def remote_engine(
    name: str, model: str | None = None, *, timeout: float | None = None, key: str | None = None
) -> RemoteEngine:
    """The engine of that name in --rollout.remote_engines. Raises LookupError if there is none.

    `timeout` (seconds) bounds one attempt; without it, --reward.timeout does. `key`, or else
    OPENAI_API_KEY, goes along.
    """
    offered = json.loads(os.environ.get(VARIABLE, '{"urls": {}}'))
    if name not in offered["urls"]:
        known = ", ".join(offered["urls"]) or "none"
        raise LookupError(f"{FLAG} has no engine {name!r}; its engines: {known}")
    rule = RuleConfig(timeout=timeout or offered["timeout"], retries=offered["retries"])
    return _engine(offered["urls"][name], model, rule, key, os.getpid())


@cache
def _engine(
    url: str, model: str | None, rule: RuleConfig, key: str | None, process: int
) -> RemoteEngine:
    """One for all who ask alike in a process: a fork does not have the threads of its parent."""
    return RemoteEngine.at(url, rule, model=model, key=key, kind="remote engine", flag=FLAG)


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """An event loop that runs in a thread of its own: that of all requests, whatever loop they come
    from.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote engines", daemon=True).start()
    return loop


def in_background(asked: Coroutine[Any, Any, T]) -> Future[T]:
    """Run something that asks engines in that loop."""
    return asyncio.run_coroutine_threadsafe(asked, _loop(os.getpid()))
