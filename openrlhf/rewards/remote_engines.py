"""OpenAI-compatible servers that the run did not start, for agents and reward functions.

User code selects them by name. The process that starts user processes puts names and URLs in its
environment, which user processes inherit.

The `openai` client is not used: its timeout bounds each read, not a whole attempt, and it cannot
take a URL with query parameters. Importing it takes 0.8 s of CPU in each user process.
"""

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from openrlhf.config.rollout import RemoteEnginesConfig, RuleConfig
from openrlhf.rewards.servers import HTTPServers, ServerError

FLAG = "--rollout.remote_engines"
VARIABLE = "OPENRLHF_REMOTE_ENGINES"
T = TypeVar("T")


def offer_engines(rollout: RemoteEnginesConfig, reward: RuleConfig) -> None:
    """Wait until all remote engines answer, then offer them to user processes that start later.

    Raises ConfigError.
    """
    urls = dict(rollout.named_engines)
    servers = HTTPServers(list(urls.values()), reward, kind="remote engine", flag=FLAG)
    asyncio.run(servers.check())
    offered = {"urls": urls, "timeout": reward.timeout, "retries": reward.retries}
    os.environ[VARIABLE] = json.dumps(offered)


class RemoteEngine:
    """One server.

    `model` is the name of a model there; with None, the first model in the server's list.
    `parameters` are parameters of the OpenAI API. Methods raise ServerError if the server is gone,
    slow, refuses, or answers something else. Methods with names in `_sync` are for code that is not
    async, and may be called from any thread. Requests of a process share their connections.
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
        """Use the server at this URL.

        The credential is `key`, or else OPENAI_API_KEY. `names` are arguments of `HTTPServers`.
        """
        key = key or os.environ.get("OPENAI_API_KEY")
        self.servers = HTTPServers([url.rstrip("/")], rule, key=key, **names)
        self._model = model
        self._first: str | None = None  # in the server's list, until the server refuses something

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """Return the text of the reply to a conversation."""
        answered = await self.ask("/chat/completions", {"messages": list(messages), **parameters})
        return self.read(answered, "choices", 0, "message", "content", kind=str)

    async def completion(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """Return the text that follows a prompt, given as text or as tokens."""
        answered = await self.ask("/completions", {"prompt": prompt, **parameters})
        return self.read(answered, "choices", 0, "text", kind=str)

    def chat_sync(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """Call `chat` and wait for its result."""
        return in_background(self.chat(messages, **parameters)).result()

    def completion_sync(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """Call `completion` and wait for its result."""
        return in_background(self.completion(prompt, **parameters)).result()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the server's answer to `body` plus the model's name. Raises ServerError."""
        if "model" not in body:
            if not (self._model or self._first):
                self._first = await self._listed("id", kind=str)
            body = {"model": self._model or self._first, **body}
        return await self._answer(body, path)

    async def room(self) -> int | None:
        """Return the token limit of request and answer together.

        It is None if the server does not report it; vLLM does.
        """
        return (await self._listed(kind=dict)).get("max_model_len")

    async def _listed(self, *path: str, kind: type[T]) -> T:
        """Return an entry of the first model in the server's list."""
        return self.read(await self._answer(None, "/models"), "data", 0, *path, kind=kind)

    async def _answer(self, body: Mapping[str, Any] | None, path: str) -> Any:
        try:
            return await asyncio.wrap_future(in_background(self.servers.ask(body, path)))
        except ValueError as error:
            self._first = None  # the server may have another model by now
            raise ServerError(f"{self.servers.kind} {error}") from error

    def read(self, answered: Any, *path: str | int, kind: type[T]) -> T:
        """Return the value at a path in an answer. Raises ServerError if it is absent."""
        found = answered
        try:
            for step in path:
                found = found[step]
        except (KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, kind):
            place = ".".join(map(str, path))
            raise ServerError(
                f"{self.servers.kind} {self.servers.servers[0].name} sent no {kind.__name__} at "
                f"{place}: {str(answered)[:200]!r}"
            )
        return found


def remote_engine(
    name: str, model: str | None = None, *, timeout: float | None = None, key: str | None = None
) -> RemoteEngine:
    """Return the engine of that name in --rollout.remote_engines. Raises LookupError if absent.

    `timeout` (seconds) bounds one attempt; without it, --reward.timeout does. The credential is
    `key`, or else OPENAI_API_KEY.
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
    """Return the engine that equal calls in a process share: a fork lacks its parent's threads."""
    return RemoteEngine(url, rule, model=model, key=key, kind="remote engine", flag=FLAG)


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests of a process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="remote engines", daemon=True).start()
    return loop


def in_background(asked: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine that asks engines in the event loop of all requests."""
    return asyncio.run_coroutine_threadsafe(asked, _loop(os.getpid()))
