"""An OpenAI-compatible endpoint for the policy, on the loopback interface of each agent process.

Any agent that uses the OpenAI API can be trained. Each session is one episode with one or more
conversations. Samples are stored as tokens with their log-probabilities. The text that clients
receive is never tokenized again.
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
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from openrlhf.agents.answers import CompletionOutput, EngineRefusal
from openrlhf.agents.chat_request import ChatRequest, TokenizeRequest, reason_of
from openrlhf.agents.contract import AgentExecutorBase, Engine
from openrlhf.agents.conversation import (
    ChatMistake,
    ContextFull,
    Conversation,
    TemplateInputs,
    check_size,
    template_inputs,
)
from openrlhf.data.continuation import encode_text
from openrlhf.data.messages import Message
from openrlhf.isolation.loading import check_method
from openrlhf.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"  # reported model name; requests may name any model
KEEP_ALIVE_S = 24 * 3600


@dataclass(kw_only=True)
class _Session:
    """The requests and conversations of one episode whose agent is running."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    engine: Engine
    params: SamplingParams
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # allows only one request at a time
    requests: set[asyncio.Task[Any]] = field(default_factory=set)  # in progress
    # Conversations that have a reply, ordered by the time of their last reply.
    conversations: list[Conversation] = field(default_factory=list)
    notices: dict[str, str] = field(default_factory=dict)
    truncated: bool = False  # True if a limit of the run truncated the last request or its reply
    last_request: dict[str, Any] = field(default_factory=dict)  # answered last
    last_answer: dict[str, Any] = field(default_factory=dict)

    def conversation_for(self, inputs: TemplateInputs) -> Conversation:
        """Return the conversation that a request continues, or a new one.

        If a request continues several conversations, return the longest of them.
        """
        continued = [each for each in self.conversations if not each.mismatch(inputs)]
        if continued:
            return max(continued, key=lambda conversation: len(conversation.tokens))
        if self.conversations:
            reason = self.conversations[-1].mismatch(inputs)
            self.notices["conversation"] = (
                f"a request starts a new conversation within its episode, because {reason}. All "
                "conversations of an episode share its reward (rollout/conversations_mean)"
            )
        return Conversation(self.tokenizer, self.max_length, max_new_tokens=self.params.max_tokens)

    def record(self, conversation: Conversation) -> None:
        """Move a conversation with a new reply to the end of `conversations`."""
        if conversation in self.conversations:
            self.conversations.remove(conversation)
        self.conversations.append(conversation)
        self.truncated = conversation.truncated


class OpenAIAgentExecutor(AgentExecutorBase):
    """An executor that calls `run_agent` once per episode, with its own session at the endpoint.

    A client's `base_url` is `self.session_url(session_id)`, or `self.base_url` with `session_id` in
    the body of each request.
    """

    base_url: str
    needs_chat_template = True

    def __init__(self) -> None:
        # A subclass may override `execute` and call `run_agent` in its own way.
        if type(self).execute is OpenAIAgentExecutor.execute:
            check_method(type(self), "run_agent", "prompt", "label", "session_id")
        self._sessions: dict[str, _Session] = {}
        self._serving: asyncio.Task[None] | None = None

    @abstractmethod
    def run_agent(self, prompt: str, label: Any, session_id: str) -> Any:
        """Run the agent on the prompt.

        Returns the reward, or a dict with `reward` and optionally `scores` and `extra_logs`. The
        method may be `async def` (with an asynchronous client) or `def` (run in a thread). A
        request that exceeds the context is rejected with status 400 and code
        `context_length_exceeded`; the episode then ends at the last reply and counts as truncated.
        """

    def session_url(self, session_id: str) -> str:
        """Return the base URL of one session."""
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
        """Run one episode: the agent's requests to its session, and the policy's replies."""
        self._tokenizer = hf_tokenizer
        self._max_length = max_length
        if self._serving is None:
            self._serving = self._start()
        session_id = uuid.uuid4().hex
        session = _Session(
            tokenizer=hf_tokenizer, max_length=max_length, engine=llm_engine, params=sampling_params
        )
        self._sessions[session_id] = session
        try:
            if inspect.iscoroutinefunction(self.run_agent):
                returned = await self.run_agent(prompt, label, session_id)
            else:
                returned = await asyncio.to_thread(self.run_agent, prompt, label, session_id)
        finally:
            del self._sessions[session_id]
            for request in session.requests:
                request.cancel()
        if not session.conversations:
            raise ChatMistake(
                "the agent made no request to its session, so there is nothing to train on"
            )
        if not isinstance(returned, Mapping):
            returned = {"reward": returned}
        notices = dict(session.notices)
        parts: list[dict[str, Any]] = []
        for part in session.conversations:
            notices |= part.notices
            parts.append({"observation_tokens": part.tokens, "action_ranges": part.ranges})
        *earlier, last = parts
        return {
            "prompt": prompt,
            "label": label,
            **last,
            "earlier": earlier,
            "rollout_log_probs": None,  # None: use the engine's log-probabilities
            **{name: returned.get(name) for name in ("reward", "scores", "extra_logs")},
            "truncated": session.truncated,
            "notices": notices,
        }

    def _start(self) -> asyncio.Task[None]:
        """Listen on a free port. Clients that connect early wait until the server is running."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        # Keep connections open, because clients reuse them for later turns.
        # A request would be lost if the server closed the client's connection at the same time.
        settings = uvicorn.Config(
            self._app(),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
        )
        return asyncio.create_task(self._serve(settings, listener))

    async def _serve(self, settings: uvicorn.Config, listener: socket.socket) -> None:
        with listener:  # uvicorn does not close the listener if this task is cancelled
            await _Server(settings).serve(sockets=[listener])

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, exception_handlers=ERROR_HANDLERS)

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        @app.get("/v1/models")
        @app.get("/sessions/{_}/v1/models")
        async def models(_: str = "") -> dict[str, Any]:
            model = {
                "id": MODEL,
                "object": "model",
                "created": 0,
                "owned_by": "openrlhf",
                "max_model_len": self._max_length,
            }
            return {"object": "list", "data": [model]}

        @app.post("/tokenize")
        @app.post("/sessions/{_}/tokenize")
        async def tokenize(request: TokenizeRequest, _: str = "") -> Any:
            text = request.prompt or ""
            if request.messages is not None:
                inputs = template_inputs(
                    request.messages, request.tools, request.chat_template_kwargs
                )
                text = inputs.render(self._tokenizer)
            check_size(text, self._max_length)
            tokens = encode_text(self._tokenizer, text)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self._max_length}

        @app.post("/v1/chat/completions")
        @app.post("/sessions/{session_id}/v1/chat/completions")
        async def chat(request: ChatRequest, session_id: str | None = None) -> Any:
            answer = await self._answer_in_session(session_id or request.session_id, request)
            if not request.stream:
                return answer
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            events = _events(answer, with_usage=with_usage)
            return StreamingResponse(events, media_type="text/event-stream")

        return app

    async def _answer_in_session(
        self, session_id: str | None, request: ChatRequest
    ) -> dict[str, Any]:
        """Answer a request in a task that is cancelled when its episode ends."""
        session = self._sessions.get(session_id or "")
        if session is None:
            raise ChatMistake(
                f"there is no session {session_id!r}. Use session_url(session_id) as base_url, "
                "or pass session_id in the body",
                "session_id",
            )
        task = asyncio.create_task(self._answer(session, request))
        session.requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if handler and handler.cancelling():  # the server is stopping, not just the episode
                raise
            raise ChatMistake("this session's episode has ended") from None
        finally:
            session.requests.discard(task)

    async def _answer(self, session: _Session, request: ChatRequest) -> dict[str, Any]:
        """Return a reply in the API's format.

        A client that repeats its last request gets the same reply again.
        """
        limits = [request.max_tokens, request.max_completion_tokens, session.params.max_tokens]
        params = replace(
            session.params,
            max_tokens=min(filter(None, limits), default=None),
            stop=request.stop or session.params.stop,
            logprobs=1,
        )
        async with session.lock:
            content = request.content()
            if content == session.last_request:
                return session.last_answer
            inputs = template_inputs(request.messages, request.tools, request.chat_template_kwargs)
            conversation = session.conversation_for(inputs)
            try:
                prompt = conversation.prompt_for(inputs)
            except ContextFull:
                session.truncated = True
                raise
            output = (await session.engine.generate(prompt, params)).outputs[0]
            message = conversation.add_reply(output, tools=request.parses_calls)
            session.record(conversation)
            logprobs = None
            if request.logprobs:
                logprobs = {"content": self._logprobs(output)}
            session.last_request = content
            session.last_answer = completion(len(prompt), output, message, logprobs)
            return session.last_answer

    def _logprobs(self, output: CompletionOutput) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for token, candidates in zip(output.token_ids, output.logprobs or [], strict=True):
            text = self._tokenizer.decode([token])
            logprob = candidates[token].logprob
            entries.append({"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []})
        return entries


def completion(
    prompt_length: int, output: CompletionOutput, message: Message, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """Format a sample as a response of the API."""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": output.finish_reason,
        "logprobs": logprobs,
        "token_ids": output.token_ids,
    }
    if "tool_calls" in message:
        choice["finish_reason"] = "tool_calls"
    sampled = len(output.token_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_length,
            "completion_tokens": sampled,
            "total_tokens": prompt_length + sampled,
        },
        "token_ids": output.token_ids,
    }


class _Server(uvicorn.Server):
    """A server that does not install signal handlers."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _error(request: Request, error: Exception) -> JSONResponse:
    """Return an error in the API's format. The traceback of a server error goes to the log."""
    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"
    message = str(error)
    param = getattr(error, "param", None)
    match error:
        case ContextFull():
            code = "context_length_exceeded"
        case EngineRefusal():
            pass
        case RequestValidationError():
            message, param = reason_of(list(error.errors()))
        case HTTPException():  # a path or method that does not exist
            status = error.status_code
            message = f"{request.method} {request.url.path}: {error.detail}"
        case _:
            status = 500
            kind = code = "server_error"
            message = f"{type(error).__name__}: {error}"
    content = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": content}, status_code=status)


ERROR_HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (EngineRefusal, RequestValidationError, HTTPException, Exception), _error
)


async def _events(answer: dict[str, Any], *, with_usage: bool) -> AsyncIterator[str]:
    """Yield a response as stream events: the message and, optionally, the usage."""
    choice = dict(answer["choices"][0])
    delta = dict(choice.pop("message"))
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    events: list[dict[str, Any]] = [{"choices": [choice | {"delta": delta}], "usage": None}]
    if with_usage:
        events.append({"choices": [], "usage": answer["usage"]})
    for event in events:
        chunk = answer | event | {"object": "chat.completion.chunk"}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
