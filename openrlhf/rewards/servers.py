"""HTTP servers not started by this run: routing, retries, backoff and error messages."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.masking import without_secrets
from openrlhf.reporting import warn, warn_once

IN_FLIGHT = 128  # maximum concurrent requests; a queued request's deadline has not started yet
LONGEST_PAUSE_S = 30.0
START_S = 30  # time that `check` waits for a server that is still starting
PROBE_S = 5.0  # time limit of one attempt in `check`
RETRIED = {408, 425, 429, *range(500, 600)}  # HTTP statuses for which a retry may succeed


class ServerError(RuntimeError):
    """Error for a server that did not respond or is temporarily down. A retry may succeed."""

    failure = Failure.SERVER  # failure kind of an episode whose code does not catch this error


@dataclass(eq=False)
class _Server:
    url: str
    in_flight: int = 0
    sent: int = 0  # number of requests sent to the server so far
    pause: float = 0.0  # duration of the last backoff in seconds; 0 after a response
    rests_until: float = 0.0  # end of the backoff, by the monotonic clock

    @property
    def name(self) -> str:
        """The URL without secrets, for messages."""
        return without_secrets(self.url)

    @property
    def rest(self) -> float:
        """The remaining backoff in seconds."""
        return max(0.0, self.rests_until - monotonic())


class HTTPServers:
    """Interchangeable servers that respond with JSON.

    `timeout` (seconds) limits each attempt; `retries` is the number of attempts after the first.
    Each failure of a server extends its backoff. Each attempt prefers servers in this order: not
    backing off, not yet tried, least busy, fewest requests so far. Idle servers are therefore used
    in rotation. If all servers are backing off, the next attempt waits for the server whose backoff
    ends first. In messages, a server is called `kind`. `flag` and `limit` are the flags that set
    the server's URL and timeout. `key` is sent with every request.
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
        # The client is bound to the event loop in which `send` and `aclose` run.
        self._client = httpx.AsyncClient(
            timeout=None, follow_redirects=True, limits=limits, headers=headers
        )
        self._turns = asyncio.Semaphore(IN_FLIGHT)

    async def check(self) -> None:
        """Wait for the servers. Raises ConfigError, naming the servers that do not respond."""
        async with httpx.AsyncClient() as client:
            problems = await asyncio.gather(*(_await_server(client, s.url) for s in self.servers))
        remedy = f"Start the {self.kind}, or correct its host and port."
        violations = [f"{self.flag}: {problem}. {remedy}" for problem in problems if problem]
        if violations:
            raise ConfigError(violations)

    async def aclose(self) -> None:
        """Close the connections. No requests can be sent afterwards."""
        await self._client.aclose()

    async def send(self, body: Mapping[str, Any] | None, path: str = "") -> Any:
        """POST `body` to the URL plus `path` in up to `retries` + 1 attempts. Return the response.

        Without a body, send a GET request. Raises ServerError after the last attempt, and
        ValueError or TypeError if a retry cannot help, for example if the response is not JSON.
        """
        tried: list[_Server] = []
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ServerError),
            stop=stop_after_attempt(self.retries + 1),
            wait=lambda _: min(server.rest for server in self.servers),
            reraise=True,
        )
        try:
            return await attempts(self._attempt, body, path, tried)
        except ServerError as error:
            raise ServerError(f"{error} (attempts: {len(tried)})") from error

    async def _attempt(
        self, body: Mapping[str, Any] | None, path: str, tried: list[_Server]
    ) -> Any:
        """Send the request to a server.

        If possible, avoid servers that are backing off or in `tried`. Raises ServerError, or
        ValueError if a retry cannot help.
        """
        method = "POST"
        if body is None:
            method = "GET"
        async with self._turns:
            server = min(
                self.servers,
                key=lambda each: (each.rest, tried.count(each), each.in_flight, each.sent),
            )
            tried.append(server)
            server.in_flight += 1
            server.sent += 1
            try:
                async with asyncio.timeout(self.timeout):
                    response = await self._client.request(
                        method, _below(server.url, path), json=body
                    )
            except TimeoutError as error:
                late = f"no response within {self.timeout:g} s ({self.limit})"
                raise self._failed(server, late) from error
            except httpx.HTTPError as error:
                raise self._failed(server, _message(error)) from error
            finally:
                server.in_flight -= 1
        if response.status_code in RETRIED:
            raise self._failed(server, _refusal(response))
        server.pause = server.rests_until = 0.0
        if response.is_error:
            raise ValueError(f"{server.name}{path} responded with {_refusal(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise ValueError(
                f"{server.name}{path} did not return JSON: {response.text[:200]!r}"
            ) from error

    def _failed(self, server: _Server, problem: str) -> ServerError:
        """Back off (twice as long after each consecutive failure) and return the error."""
        if not server.rest:  # failures of concurrent requests count as one
            if not server.pause:
                warn(f"{self.kind} {server.name}: {problem}")
            server.pause = min(max(1.0, 2 * server.pause), LONGEST_PAUSE_S)
            server.rests_until = monotonic() + server.pause * random.uniform(0.5, 1.0)
        return ServerError(f"{self.kind} {server.name}: {problem}")


async def _await_server(client: httpx.AsyncClient, url: str) -> str | None:
    """Wait up to START_S for any response.

    Return None, or a description of the problem if no response arrives.
    """
    problem = f"{without_secrets(url)} does not respond"
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await client.head(url, timeout=PROBE_S)
                    return None
                except httpx.ReadTimeout:
                    return None  # the server accepted the connection but is busy
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    problem = f"{without_secrets(url)} does not respond: {_message(error)}"
                warn_once(f"{problem}; waiting up to {START_S:d} s for it")
                await asyncio.sleep(1.0)
    return problem


def _below(url: str, path: str) -> str:
    """Return the URL with `path` appended before its query parameters."""
    base, question_mark, parameters = url.partition("?")
    return base + path + question_mark + parameters


def _refusal(response: httpx.Response) -> str:
    return without_secrets(f"status {response.status_code}: {response.text[:200]!r}")


def _message(error: Exception) -> str:
    return without_secrets(f"{type(error).__name__} {error}".strip())
