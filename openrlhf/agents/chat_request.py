"""Requests to the OpenAI-compatible endpoint.

Every field is used, ignored, or rejected with an error that names it.
"""

from inspect import signature
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from transformers.utils.chat_template_utils import render_jinja_template

# Ignored fields. The run sets the sampling parameters, so that the log-probabilities match the
# policy. The remaining fields identify the client for accounting and caching.
WITHOUT_EFFECT = {
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
# OpenAI and vLLM fields with their accepted values, which request the default behavior.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "return_token_ids": (True, False),
    "echo": (False,),
}
# Arguments that the endpoint itself passes to the chat template.
RESERVED_VARIABLES = {"messages", *signature(render_jinja_template).parameters} - {"kwargs"}

Text = Annotated[str, Field(min_length=1)]
Length = Annotated[int, Field(ge=1)]


class _Request(BaseModel):
    """A request. Fields not declared here are accepted only with certain values."""

    model_config = ConfigDict(extra="allow", strict=True)

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_other_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in WITHOUT_EFFECT:
                continue
            accepted = NEUTRAL_VALUES.get(name, ())
            if not any(type(value) is type(other) and value == other for other in accepted):
                allowed = "".join(f" or set it to {other!r}" for other in accepted)
                raise _unsupported(name, f"{value!r:.100} is not supported. Remove it{allowed}")
        reserved = RESERVED_VARIABLES & (self.chat_template_kwargs or {}).keys()
        if reserved:
            raise _unsupported("chat_template_kwargs", f"{sorted(reserved)} cannot be set")
        return self


class StreamOptions(BaseModel):
    """Options for a streamed response. `include_obfuscation` has no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(_Request):
    """A request to /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    session_id: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options and not self.stream:
            raise _unsupported("stream_options", "requires stream: true")
        return self

    @property
    def parses_calls(self) -> bool:
        """True if tool calls are parsed from the reply."""
        return bool(self.tools) and (self.model_extra or {}).get("tool_choice") != "none"

    def content(self) -> dict[str, Any]:
        """Return the fields that determine the reply, used to recognize a repeated request."""
        return self.model_dump(exclude={"stream", "stream_options", "session_id"} | WITHOUT_EFFECT)


class TokenizeRequest(_Request):
    """A request to /tokenize, with either messages or a prompt."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise _unsupported("messages", "pass either messages or a prompt")
        return self


def _unsupported(name: str, reason: str) -> PydanticCustomError:
    """Return an error about a field. The field's name becomes the error's `param`."""
    return PydanticCustomError("unsupported", "{name}: {reason}", {"name": name, "reason": reason})


def reason_of(errors: list[Any]) -> tuple[str, str | None]:
    """Return a message for a request's first validation error, and the field's name."""
    error = errors[0]
    if error["type"] == "unsupported":
        return error["msg"], error["ctx"]["name"]
    if error["type"] == "json_invalid":
        detail = error.get("ctx", {}).get("error", error["msg"])
        return f"the body is not valid JSON: {detail}, at character {error['loc'][-1]}", None
    location = [str(part) for part in error["loc"] if part != "body"]
    if not location:
        return f"the body must be a JSON object: {error['msg']}", None
    field = location[0]
    if error["type"] == "missing":
        return f"{'.'.join(location)} is missing", field
    return f"{'.'.join(location)}: {error['msg']}, not {error['input']!r:.100}", field
