"""HTTP servers that this run did not start: routing, retries, back-off, error messages."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.masking import without_secrets
from openrlhf.reporting import warn

IN_FLIGHT = 128  # concurrent requests; further requests wait, and their deadlines do not run yet
LONGEST_PAUSE_S = 30.0
START_S = 30  # how long `check` waits for a server that is still starting
PROBE_S = 5.0  # for one attempt of `check`
RETRIED = {408, 425, 429, *range(500, 600)}  # statuses that another attempt may change


class ServerError(RuntimeError):
    """A server did not answer, or is temporarily unable to: another attempt may succeed."""

    failure = Failure.SERVER  # what an episode counts as if user code does not catch it


@dataclass
class _Server:
    url: str
    in_flight: int = 0
    failures: int = 0  # since it last answered
    rests_until: float = 0.0  # by the monotonic clock

    @property
    def name(self) -> str:
        """The URL without secrets, for messages."""
        return without_secrets(self.url)

    @property
    def rest(self) -> float:
        """The seconds for which it still rests."""
        return max(0.0, self.rests_until - monotonic())


class HTTPServers:
    """Interchangeable servers that answer with JSON.

    `timeout` (seconds) bounds one attempt, `retries` is the number of attempts after the first. A
    server that failed rests, each time longer. An attempt prefers a server that does not rest, then
    one not yet tried, then the least busy. If all of them rest, the next attempt waits for the one
    whose rest ends first, and goes to it. `kind` names a server in messages, `flag` is the flag of
    its URL, `limit` the flag of the timeout, `key` the credential sent with every request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        rule: RuleConfig,
        *,
        kind: str,
        flag: str,
        key: str | None = None,
        limit: str = "--reward.timeout",
    ) -> None:
        self.servers = [_Server(url) for url in urls]
        self.timeout = rule.timeout
        self.retries = rule.retries
        self.kind = kind
        self.flag = flag
        self.limit = limit
        headers: dict[str, str] = {}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        # Of the event loop that `ask` and `aclose` run in.
        self._client = httpx.AsyncClient(
            timeout=None, follow_redirects=True, limits=limits, headers=headers
        )
        self._turns = asyncio.Semaphore(IN_FLIGHT)

    async def check(self) -> None:
        """Wait for the servers. Raises ConfigError naming the servers that do not answer."""
        async with httpx.AsyncClient() as client:
            problems = await asyncio.gather(*(_await_server(client, s.url) for s in self.servers))
        if problems := [problem for problem in problems if problem]:
            remedy = f"Start the {self.kind}, or correct host and port."
            raise ConfigError([f"{self.flag}: {problem}. {remedy}" for problem in problems])

    async def aclose(self) -> None:
        """Close the connections. Nothing can be asked afterwards."""
        await self._client.aclose()

    async def ask(self, body: Mapping[str, Any] | None, path: str = "") -> Any:
        """Return the first answer in `retries` + 1 attempts to POST `body` to the URL plus `path`.

        Without a body the request is a GET. Raises ServerError after the last attempt, ValueError
        or TypeError if the answer is not JSON.
        """
        tried: list[str] = []
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ServerError),
            stop=stop_after_attempt(self.retries + 1),
            wait=lambda _: min(server.rest for server in self.servers),
            reraise=True,
        )
        try:
            return await attempts(self._attempt, body, path, tried)
        except ServerError as error:
            attempts_made = "1 attempt"
            if len(tried) > 1:
                attempts_made = f"{len(tried)} attempts"
            raise ServerError(f"{error} (after {attempts_made})") from error

    async def _attempt(self, body: Mapping[str, Any] | None, path: str, tried: list[str]) -> Any:
        """Return the answer of one server, if possible one that does not rest and was not `tried`.

        Raises ServerError, or ValueError if another attempt cannot help.
        """
        async with self._turns:
            server = min(
                self.servers, key=lambda each: (each.rest, tried.count(each.url), each.in_flight)
            )
            tried.append(server.url)
            server.in_flight += 1
            try:
                response = await self._send(server, body, path)
            finally:
                server.in_flight -= 1
        server.failures = 0
        server.rests_until = 0.0
        if response.is_error:
            raise ValueError(f"{server.name}{path} answered {_refusal(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise ValueError(
                f"{server.name}{path} sent no JSON: {response.text[:200]!r}"
            ) from error

    async def _send(
        self, server: _Server, body: Mapping[str, Any] | None, path: str
    ) -> httpx.Response:
        method = "POST"
        if body is None:
            method = "GET"
        try:
            async with asyncio.timeout(self.timeout):
                response = await self._client.request(method, _below(server.url, path), json=body)
        except TimeoutError as error:
            late = f"no answer within {self.timeout:g} s ({self.limit})"
            raise self._failed(server, late) from error
        except httpx.HTTPError as error:
            raise self._failed(server, _message(error)) from error
        if response.status_code in RETRIED:
            raise self._failed(server, _refusal(response))
        return response

    def _failed(self, server: _Server, problem: str) -> ServerError:
        """Let the server rest, twice as long after each failure in a row; return the error."""
        if not server.rest:  # requests that were under way together count as one failure
            if not server.failures:
                warn(f"{self.kind} {server.name}: {problem}")
            server.failures = min(server.failures + 1, 10)
            pause = min(0.5 * 2**server.failures, LONGEST_PAUSE_S)
            server.rests_until = monotonic() + pause * random.uniform(0.5, 1.0)
        return ServerError(f"{self.kind} {server.name}: {problem}")


async def _await_server(client: httpx.AsyncClient, url: str) -> str | None:
    """Wait START_S for a server. Return None once it answers anything, else the problem."""
    deadline = monotonic() + START_S
    problem = None
    while (remaining := deadline - monotonic()) > 0:
        try:
            await client.head(url, timeout=min(PROBE_S, remaining))
            return None
        except httpx.ReadTimeout:
            return None  # it accepted the connection, and is busy
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            failure = f"{without_secrets(url)} does not answer: {_message(error)}"
        if problem is None:
            warn(f"{failure}; waiting up to {START_S:d} s for it")
        problem = failure
        await asyncio.sleep(max(0.0, min(1.0, deadline - monotonic())))
    return problem


def _below(url: str, path: str) -> str:
    """Return the URL with `path` appended before its query parameters."""
    base, question_mark, parameters = url.partition("?")
    return base + path + question_mark + parameters


def _refusal(response: httpx.Response) -> str:
    return without_secrets(f"status {response.status_code}: {response.text[:200]!r}")


def _message(error: Exception) -> str:
    return without_secrets(f"{type(error).__name__} {error}".strip())
