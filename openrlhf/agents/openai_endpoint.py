"""An OpenAI-compatible endpoint in front of the policy, on loopback in each process of agents: any
agent that speaks it can be trained.

Every session is one episode, of one conversation or several. What the policy sampled is kept as
tokens, with their log-probabilities; the text that clients see is never tokenised again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from openrlhf.agents.answers import CompletionOutput, EngineRefusal
from openrlhf.agents.chat_request import ChatRequest, TokenizeRequest, reason_of
from openrlhf.agents.chat_session import (
    Asked,
    ChatMistake,
    ChatSession,
    ContextFull,
    asked_for,
    check_size,
)
from openrlhf.agents.continuation import encode
from openrlhf.agents.contract import AgentExecutorBase, Engine
from openrlhf.data.messages import Message
from openrlhf.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"  # any other name will do
MODEL_CARD: dict[str, Any] = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openrlhf"}
KEEP_ALIVE_S = 24 * 3600


@dataclass(kw_only=True)
class _Open:
    """A session while its agent runs."""

    new_chat: Callable[[], ChatSession]
    engine: Engine
    params: SamplingParams
    turn: asyncio.Lock = field(
        default_factory=asyncio.Lock
    )  # requests of one conversation follow each other
    requests: set[asyncio.Task[Any]] = field(default_factory=set)  # under way
    chats: list[ChatSession] = field(
        default_factory=list[ChatSession]
    )  # conversations, by their last replies
    notices: dict[str, str] = field(default_factory=dict[str, str])
    truncated: bool = False  # the last request or reply met a limit of the run
    answered: tuple[dict[str, Any], dict[str, Any]] | None = (
        None  # the last request, and its answer
    )

    def chat_for(self, asked: Asked) -> ChatSession:
        """Return the conversation that a request continues, the longest if there are several, else
        a new one.
        """
        continued = [chat for chat in self.chats if not chat.parting(asked)]
        if continued:
            return max(continued, key=lambda chat: len(chat.tokens))
        if self.chats:
            self.notices["conversation"] = (
                f"a request starts a new conversation in its episode, because {self.chats[-1].parting(asked)}. The "
                "conversations of an episode share its reward (rollout/conversations_mean)"
            )
        return self.new_chat()

    def heard(self, chat: ChatSession) -> None:
        """Note that a conversation has got a reply."""
        self.chats = [other for other in self.chats if other is not chat]
        self.chats.append(chat)
        self.truncated = chat.truncated


class OpenAIAgentExecutor(AgentExecutorBase):
    """Runs `run_agent` once per episode, with a session of its own at the endpoint.

    A client's `base_url` is `self.session_url(session_id)`; or `self.base_url`, with `session_id`
    in the body of requests.
    """

    base_url: str
    needs_chat_template = True

    def __init__(self) -> None:
        self._sessions: dict[str, _Open] = {}
        self._serving: asyncio.Task[None] | None = None
        self._tokenizer: PreTrainedTokenizerBase
        self._max_length = 0

    @abstractmethod
    def run_agent(self, prompt: str, label: Any, session_id: str) -> Any:
        """Let the agent work on the prompt; returns its reward, or a dict with `reward`, and
        optionally `scores`, `extra_logs`.

        Either `async def`, with a client that awaits, or `def`, which runs in a thread. A
        conversation that fills the context is refused with status 400 and code
        `context_length_exceeded`; what it had so far is the episode, truncated.
        """

    def session_url(self, session_id: str) -> str:
        """The endpoint of one session."""
        return self.base_url.removesuffix("/v1") + f"/sessions/{session_id}/v1"

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: PreTrainedTokenizerBase,
        llm_engine: Engine,
        images: Any = None,
    ) -> dict[str, Any]:
        """One episode: all that the agent said through its session."""
        self._tokenizer, self._max_length = hf_tokenizer, max_length
        if self._serving is None:
            self._serving = self._start()
        session_id = uuid.uuid4().hex
        new_chat = partial(
            ChatSession, hf_tokenizer, max_length, max_new_tokens=sampling_params.max_tokens
        )
        session = _Open(new_chat=new_chat, engine=llm_engine, params=sampling_params)
        self._sessions[session_id] = session
        waits = inspect.iscoroutinefunction(self.run_agent)
        run = self.run_agent if waits else partial(asyncio.to_thread, self.run_agent)
        try:
            returned = await run(prompt, label, session_id)
        finally:
            del self._sessions[session_id]
            for request in session.requests:
                request.cancel()
        if not session.chats:
            raise ChatMistake(
                "the agent made no request to its session, so there is nothing to train on"
            )
        result = returned if isinstance(returned, Mapping) else {"reward": returned}
        *earlier, last = session.chats
        notices = dict(session.notices)
        for chat in session.chats:
            notices |= chat.notices
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": last.tokens,
            "action_ranges": last.ranges,
            "earlier": [
                {"observation_tokens": chat.tokens, "action_ranges": chat.ranges}
                for chat in earlier
            ],
            "rollout_log_probs": None,  # the engine's own
            "reward": result.get("reward"),
            "scores": result.get("scores"),
            "extra_logs": result.get("extra_logs"),
            "truncated": session.truncated,
            "notices": notices,
        }

    def _start(self) -> asyncio.Task[None]:
        """Listen at a free port. Clients that connect before the server runs wait."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        # Clients keep connections for later turns: closed under them, a request is lost.
        settings = uvicorn.Config(
            self._app(),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
        )
        return asyncio.create_task(self._serve(settings, listener))

    async def _serve(self, settings: uvicorn.Config, listener: socket.socket) -> None:
        with listener:
            await _Server(settings).serve(sockets=[listener])

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for kind, handler in ERROR_HANDLERS.items():
            app.add_exception_handler(kind, handler)

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        @app.get("/v1/models")
        @app.get("/sessions/{_}/v1/models")
        async def models(_: str = "") -> dict[str, Any]:
            return {"object": "list", "data": [MODEL_CARD | {"max_model_len": self._max_length}]}

        @app.post("/tokenize")
        @app.post("/sessions/{_}/tokenize")
        async def tokenize(request: TokenizeRequest, _: str = "") -> Any:
            if request.messages is None:
                text = request.prompt or ""
            else:
                text = asked_for(
                    request.messages, request.tools, request.chat_template_kwargs
                ).rendered(self._tokenizer)
            check_size(text, self._max_length)
            tokens = encode(self._tokenizer, text)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self._max_length}

        @app.post("/v1/chat/completions")
        @app.post("/sessions/{session_id}/v1/chat/completions")
        async def chat(request: ChatRequest, session_id: str | None = None) -> Any:
            session = self._sessions.get(session_id or request.session_id or "")
            if session is None:
                known = "use session_url(session_id) as base_url, or give session_id in the body"
                raise ChatMistake(
                    f"there is no session {session_id or request.session_id!r}: {known}",
                    "session_id",
                )
            asking = asyncio.create_task(self._answer(session, request))
            session.requests.add(asking)
            try:
                answer = await asking
            except asyncio.CancelledError:
                if (
                    handler := asyncio.current_task()
                ) and handler.cancelling():  # the server ends, not the episode
                    raise
                raise ChatMistake("the episode of this session is over") from None
            finally:
                session.requests.discard(asking)
            if not request.stream:
                return answer
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            return StreamingResponse(
                _streamed(answer, with_usage=with_usage), media_type="text/event-stream"
            )

        return app

    async def _answer(self, session: _Open, request: ChatRequest) -> dict[str, Any]:
        """Sample a reply, as the API puts it; a client that repeats a request gets the answer that
        it missed.
        """
        limits = [request.max_tokens, request.max_completion_tokens, session.params.max_tokens]
        most = min((limit for limit in limits if limit), default=None)
        params = replace(
            session.params, max_tokens=most, stop=request.stop or session.params.stop, logprobs=1
        )
        async with session.turn:
            content = request.content()
            if session.answered and session.answered[0] == content:
                return session.answered[1]
            asked = asked_for(request.messages, request.tools, request.chat_template_kwargs)
            chat = session.chat_for(asked)
            try:
                prompt = chat.prompt_for(asked)
            except ContextFull:
                session.truncated = True
                raise
            output = (await session.engine.generate(prompt, params)).outputs[0]
            message = chat.heard(prompt, output, tools=request.reads_calls)
            session.heard(chat)
            answer = self._completion(prompt, output, message, logprobs=bool(request.logprobs))
            session.answered = (content, answer)
            return answer

    def _completion(
        self, prompt: list[int], output: CompletionOutput, message: Message, *, logprobs: bool
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else output.finish_reason,
            "logprobs": {"content": self._logprobs(output)} if logprobs else None,
            "token_ids": output.token_ids,
        }
        sampled = len(output.token_ids)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
            "token_ids": output.token_ids,
        }

    def _logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        entries = zip(output.token_ids, output.logprobs or [], strict=True)
        return [
            {
                "token": self._tokenizer.decode([t]),
                "logprob": e[t].logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for t, e in entries
        ]


class _Server(uvicorn.Server):
    """A server that leaves signals alone: it is a guest in its process."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _refused(_: Request, mistake: Exception) -> JSONResponse:
    """Answer a request that cannot be served."""
    code = "context_length_exceeded" if isinstance(mistake, ContextFull) else "invalid_request"
    return _error(400, str(mistake), code=code, param=getattr(mistake, "param", None))


def _malformed(_: Request, mistake: Exception) -> JSONResponse:
    """Answer a request with a missing, wrong or unsupported field, or without valid JSON."""
    assert isinstance(mistake, RequestValidationError)
    reason, param = reason_of(list(mistake.errors()))
    return _error(400, reason, code="invalid_request", param=param)


def _misdirected(request: Request, mistake: Exception) -> JSONResponse:
    """Answer a request for a path or method that does not exist."""
    assert isinstance(mistake, HTTPException)
    reason = f"{request.method} {request.url.path}: {mistake.detail}"
    return _error(mistake.status_code, reason, code="invalid_request")


def _broken(_: Request, mistake: Exception) -> JSONResponse:
    """Answer a request that met a fault of the server. The traceback goes to the log."""
    return _error(500, f"{type(mistake).__name__}: {mistake}", code="server_error")


ERROR_HANDLERS = {
    EngineRefusal: _refused,
    RequestValidationError: _malformed,
    HTTPException: _misdirected,
    Exception: _broken,
}


def _error(status: int, message: str, *, code: str, param: str | None = None) -> JSONResponse:
    """Return an error in the API's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status)


async def _streamed(answer: dict[str, Any], *, with_usage: bool) -> AsyncIterator[str]:
    """Yield a whole reply as the events of a stream: the message, how it ended, and the usage if it
    is asked for.
    """
    [choice] = answer["choices"]
    message = choice["message"]
    delta = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    said = {
        "index": 0,
        "delta": delta,
        "finish_reason": None,
        "logprobs": choice["logprobs"],
        "token_ids": choice["token_ids"],
    }
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    events: list[dict[str, Any]] = [{"choices": [said]}, {"choices": [ended]}]
    if with_usage:
        events = [{**event, "usage": None} for event in events]
        events.append({"choices": [], "usage": answer["usage"]})
    common = {name: answer[name] for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    for event in events:
        yield f"data: {json.dumps(common | event)}\n\n"
    yield "data: [DONE]\n\n"
