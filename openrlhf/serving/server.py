"""POST /get_reward and GET /health: what is asked, what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from openrlhf.config.options import ConfigError
from openrlhf.config.serving import ServeConfig
from openrlhf.data.errors import DataError, kind
from openrlhf.models.loading import ModelError
from openrlhf.serving.batcher import Batcher, Texts
from openrlhf.serving.scorer import load_scorer

logger = logging.getLogger(__name__)

USER_ERRORS = (ConfigError, DataError, ModelError)
CONNECTIONS = 1024  # at a time; more are answered with status 503
FAREWELL_S = 10  # that requests under way have left when the server is stopped
EXAMPLE = '{"query": ["prompt and response"]}'


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """How much one request may hold."""

    texts: int
    mib: float


def run_server(config: ServeConfig) -> None:
    """Load the model and answer until stopped. Raises one of USER_ERRORS before the first request."""
    listener = listen(config.host, config.port)
    tokenize, score = load_scorer(config)
    batcher = Batcher(
        score, max_texts=config.batch_size, max_tokens=config.max_batch_tokens, max_wait=config.max_batch_wait
    )
    limits = RequestLimits(texts=config.max_request_texts, mib=config.max_request_mib)
    app = reward_app(tokenize, batcher, limits)
    if config.dry_run:
        print(f"{config.reward.model_name_or_path} can be served.")
        return
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=FAREWELL_S
    )
    host = f"[{config.host}]" if ":" in config.host else config.host
    port = listener.getsockname()[1]
    print(f"serving {config.reward.model_name_or_path} at http://{host}:{port}/get_reward", flush=True)
    uvicorn.Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that has the address before minutes go into a model; who asks meanwhile waits. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: the server cannot listen there: {error.strerror}.") from error


def reward_app(tokenize: Callable[[list[str]], Texts], batcher: Batcher, limits: RequestLimits) -> FastAPI:
    """The application. Texts are read, tokenized and scored in threads: the event loop only passes them on."""
    reader = ThreadPoolExecutor(1, "read")  # tokenizers are not made for several threads

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scoring = asyncio.create_task(batcher.run())
        yield
        scoring.cancel()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        body = await read_body(request, limits)

        def read() -> Texts:
            return tokens_of(read_texts(body, limits), tokenize)

        texts = await asyncio.get_running_loop().run_in_executor(reader, read)
        try:
            scores = await batcher.scores(texts)
        except Exception as error:
            logger.exception("a request with %d texts could not be scored", len(texts))
            raise HTTPException(500, f"The texts could not be scored: {type(error).__name__}: {error}") from error
        for number, score in enumerate(scores):
            if not math.isfinite(score):
                raise HTTPException(500, f"The reward model's score of query[{number}] is {score}.")
        return JSONResponse({"rewards": scores, "scores": scores, "extra_logs": {"dummy_scores": scores}})

    return app


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """The body, of which no more than the limit is ever held. Status 413 for a larger one."""
    largest = int(limits.mib * 2**20)
    too_large = HTTPException(413, f"The request is larger than {limits.mib:g} MiB (--max_request_mib).")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > largest:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            raise too_large
    return bytes(body)


def read_texts(body: bytes, limits: RequestLimits) -> list[str]:
    """The texts of a request; `prompts`, `labels` and whatever else it holds are not looked at. Status 422 or 413."""
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"The request is no JSON ({error})") from error
    if not isinstance(content, dict) or "query" not in content:
        raise _wrong("The request has no query")
    query = content["query"]
    if not isinstance(query, list) or not query:
        raise _wrong(f"query is {'an empty list' if query == [] else f'{kind(query)}, not a list'}")
    if len(query) > limits.texts:
        raise HTTPException(
            413, f"query holds {len(query)} texts, and {limits.texts} are allowed (--max_request_texts)."
        )
    for number, text in enumerate(query):
        if not isinstance(text, str):
            raise _wrong(f"query[{number}] is {kind(text)}, not a text")
    return query


def tokens_of(texts: list[str], tokenize: Callable[[list[str]], Texts]) -> Texts:
    """Token ids of each text. Status 422 where there are none."""
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _wrong(f"query[{number}] is no Unicode text ({error.reason})") from error
    tokens = tokenize(texts)
    if [] in tokens:
        raise _wrong(f"query[{tokens.index([])}] has no tokens: there is nothing to score")
    return tokens


def _wrong(what: str) -> HTTPException:
    return HTTPException(422, f"{what}. Send texts as in {EXAMPLE}.")
