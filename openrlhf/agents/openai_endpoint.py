"""An OpenAI-compatible endpoint in front of the policy, on loopback in each process of agents: any agent that speaks it can be trained.

Every session is one conversation and one episode. What the policy sampled is kept as tokens, with their log-probabilities;
the text that clients see is never tokenised again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from openrlhf.agents.answers import CompletionOutput, EngineRefusal
from openrlhf.agents.chat_session import ChatMistake, ChatSession, ContextFull
from openrlhf.agents.contract import AgentExecutorBase, Engine
from openrlhf.data.templates import Message
from openrlhf.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"  # any other name will do
MODEL_CARD: dict[str, Any] = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openrlhf"}
KEEP_ALIVE_S = 24 * 3600


class ChatRequest(BaseModel):
    """What is read of a request to /v1/chat/completions. How replies are sampled is the run's affair, but for their length."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    stream: bool = False
    logprobs: bool = False
    session_id: str | None = None


class TokenizeRequest(BaseModel):
    """What is read of a request to /tokenize."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None


@dataclass(kw_only=True)
class _Open:
    """A session while its agent runs."""

    chat: ChatSession
    engine: Engine
    params: SamplingParams
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # requests of one conversation follow each other
    requests: set[asyncio.Task[Any]] = field(default_factory=set)  # under way
    answered: tuple[list[dict[str, Any]], dict[str, Any]] | None = None  # the last request's messages, and its answer


class OpenAIAgentExecutor(AgentExecutorBase):
    """Runs `run_agent` once per episode, with a session of its own at the endpoint.

    A client's `base_url` is `self.session_url(session_id)`; or `self.base_url`, with `session_id` in the body of requests.
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
        """Let the agent work on the prompt; returns its reward, or a dict with `reward`, and optionally `scores`, `extra_logs`.

        Either `async def`, with a client that awaits, or `def`, which runs in a thread. A conversation that fills the context
        is refused with status 400 and code `context_length_exceeded`; what it had so far is the episode, truncated.
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
        session_id, chat = uuid.uuid4().hex, ChatSession(hf_tokenizer, max_length)
        session = _Open(chat=chat, engine=llm_engine, params=sampling_params)
        self._sessions[session_id] = session
        waits = inspect.iscoroutinefunction(self.run_agent)
        run = self.run_agent if waits else partial(asyncio.to_thread, self.run_agent)
        try:
            returned = await run(prompt, label, session_id)
        finally:
            del self._sessions[session_id]
            for request in session.requests:
                request.cancel()
        if not chat.ranges:
            raise ChatMistake("the agent made no request to its session, so there is nothing to train on")
        result = returned if isinstance(returned, Mapping) else {"reward": returned}
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": chat.tokens,
            "action_ranges": chat.ranges,
            "rollout_log_probs": None,  # the engine's own
            "reward": result.get("reward"),
            "scores": result.get("scores"),
            "extra_logs": result.get("extra_logs"),
            "truncated": chat.truncated,
        }

    def _start(self) -> asyncio.Task[None]:
        """Listen at a free port. Clients that connect before the server runs wait."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        # Clients keep connections for later turns: closed under them, a request is lost.
        settings = uvicorn.Config(self._app(), log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
        return asyncio.create_task(_Server(settings).serve(sockets=[listener]))

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_exception_handler(EngineRefusal, _refused)

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
                tokens = list(self._tokenizer(request.prompt or "", add_special_tokens=False)["input_ids"])
            else:
                tokens = ChatSession(self._tokenizer, 1 << 40).prompt_for(request.messages, request.tools)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self._max_length}

        @app.post("/v1/chat/completions")
        @app.post("/sessions/{session_id}/v1/chat/completions")
        async def chat(request: ChatRequest, session_id: str | None = None) -> Any:
            session = self._sessions.get(session_id or request.session_id or "")
            if session is None:
                known = "use session_url(session_id) as base_url, or give session_id in the body"
                raise ChatMistake(f"there is no session {session_id or request.session_id!r}: {known}")
            asking = asyncio.create_task(self._answer(session, request))
            session.requests.add(asking)
            try:
                answer = await asking
            except asyncio.CancelledError:
                if (handler := asyncio.current_task()) and handler.cancelling():  # the server ends, not the episode
                    raise
                raise ChatMistake("the episode of this session is over") from None
            finally:
                session.requests.discard(asking)
            return StreamingResponse(_streamed(answer), media_type="text/event-stream") if request.stream else answer

        return app

    async def _answer(self, session: _Open, request: ChatRequest) -> dict[str, Any]:
        """Sample a reply, as the API puts it; a client that repeats a request gets the answer that it missed."""
        limits = [request.max_tokens, request.max_completion_tokens, session.params.max_tokens]
        most = min((limit for limit in limits if limit), default=None)
        params = replace(session.params, max_tokens=most, stop=request.stop or session.params.stop, logprobs=1)
        async with session.turn:
            if session.answered and session.answered[0] == request.messages:
                return session.answered[1]
            prompt = session.chat.prompt_for(request.messages, request.tools)
            output = (await session.engine.generate(prompt, params)).outputs[0]
            message = session.chat.heard(prompt, output, tools=bool(request.tools))
            answer = self._completion(prompt, output, message, logprobs=request.logprobs)
            session.answered = (request.messages, answer)
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
            {"token": self._tokenizer.decode([t]), "logprob": e[t].logprob, "bytes": None, "top_logprobs": []}
            for t, e in entries
        ]


class _Server(uvicorn.Server):
    """A server that leaves signals alone: it is a guest in its process."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _refused(_: Request, mistake: Exception) -> JSONResponse:
    """An error in the API's form."""
    code = "context_length_exceeded" if isinstance(mistake, ContextFull) else "invalid_request"
    error = {"message": str(mistake), "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=400)


async def _streamed(answer: dict[str, Any]) -> AsyncIterator[str]:
    """A whole reply as the events of a stream."""
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
    delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
    for part, finish in ((delta, None), ({}, choice["finish_reason"])):
        event = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        yield f"data: {json.dumps(event | {'choices': [{'index': 0, 'delta': part, 'finish_reason': finish}]})}\n\n"
    yield "data: [DONE]\n\n"
