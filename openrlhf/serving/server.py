"""The HTTP API of the reward server, which consists of POST /get_reward and GET /health."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from traceback import format_exc

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect

from openrlhf.config.options import ConfigError
from openrlhf.config.serving import ServeConfig
from openrlhf.reporting import say, warn
from openrlhf.serving.batcher import Batcher, Texts
from openrlhf.serving.connections import MAX_CONNECTIONS, Connection, raise_connection_limit
from openrlhf.serving.scorer import load_scorer
from openrlhf.units import MIB

PIECE_TEXTS = 4  # number of texts tokenized before another request gets its turn
SHUTDOWN_TIMEOUT_S = 10  # time allowed for requests in progress when the server stops
EXAMPLE = '{"query": ["prompt and response"]}'


def run_server(config: ServeConfig) -> None:
    """Load the model and serve it until the process is stopped.

    Raises UserError at startup if the address or the model cannot be used.
    """
    listener = listen(config.host, config.port)
    tokenize, score = load_scorer(config)
    batcher = Batcher(score, max_tokens=config.max_batch_tokens, max_wait=config.max_batch_wait)
    app = reward_app(
        tokenize, batcher, max_texts=config.max_request_texts, max_mib=config.max_request_mib
    )
    if config.dry_run:
        say(f"{config.reward.model_name_or_path} can be served.")
        return
    settings = uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        access_log=False,
        limit_concurrency=raise_connection_limit(),
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listener.getsockname()[1]}/get_reward"
    say(f"serving {config.reward.model_name_or_path} at {url}")
    uvicorn.Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be used.

    The socket is opened before the model is loaded, so early clients wait instead of failing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"The server cannot listen on --host {host} --port {port}: {error.strerror}. Choose "
            "another address or port."
        ) from error


def reward_app(
    tokenize: Callable[[list[str]], Texts], batcher: Batcher, *, max_texts: int, max_mib: float
) -> FastAPI:
    """Return the application. Requests are limited to `max_texts` texts and `max_mib` MiB.

    Requests are parsed, tokenized and scored in threads, so the event loop stays free.
    """
    # Use a single thread, because tokenizers are not thread-safe.
    reader = ThreadPoolExecutor(1, "read")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scoring = asyncio.create_task(batcher.run())
        yield
        scoring.cancel()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    app.add_exception_handler(ClientDisconnect, lambda _, error: Response(status_code=400))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        body = await read_body(request, max_mib=max_mib)
        in_thread = partial(asyncio.get_running_loop().run_in_executor, reader)
        query = await in_thread(partial(read_query, body, max_texts=max_texts))
        texts: Texts = []
        # Each group of texts queues for the thread separately, so that requests alternate.
        for start in range(0, len(query), PIECE_TEXTS):
            texts += await in_thread(tokenize, query[start : start + PIECE_TEXTS])
        if [] in texts:
            raise _unprocessable(f"query.{texts.index([])}: The text has no tokens to score")
        try:
            scores = await batcher.scores(texts)
        except Exception as error:
            warn(f"A request with {len(texts)} texts could not be scored.\n{format_exc()}")
            raise HTTPException(
                500, f"The texts could not be scored: {type(error).__name__}: {error}"
            ) from error
        for number, score in enumerate(scores):
            if not math.isfinite(score):
                raise HTTPException(500, f"The reward model's score of query[{number}] is {score}.")
        return JSONResponse(
            {"rewards": scores, "scores": scores, "extra_logs": {"dummy_scores": scores}}
        )

    return app


async def read_body(request: Request, *, max_mib: float) -> bytes:
    """Return the body of a request.

    Raises HTTPException with status 413 for a body above `max_mib` MiB, without reading the rest of
    the body into memory.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_mib * MIB:
            raise HTTPException(
                413, f"The request is larger than {max_mib:g} MiB (--max_request_mib)."
            )
    return bytes(body)


class RewardQuery(BaseModel):
    """The only request field that is used. Other fields, such as `labels`, are ignored."""

    query: list[str] = Field(min_length=1)


def read_query(body: bytes, *, max_texts: int) -> list[str]:
    """Return the texts in a request's `query`. Raises HTTPException with status 422 or 413."""
    try:
        query = RewardQuery.model_validate_json(body).query
    except ValidationError as error:
        [first, *_] = error.errors()
        place = ".".join(map(str, first["loc"])) or "The request"
        raise _unprocessable(f"{place}: {first['msg']}") from error
    if len(query) > max_texts:
        raise HTTPException(
            413,
            f"query has {len(query)} texts; at most {max_texts} are allowed (--max_request_texts).",
        )
    return query


def _unprocessable(problem: str) -> HTTPException:
    return HTTPException(422, f"{problem}. Expected format: {EXAMPLE}.")
