"""The code that runs inside each agent process.

One executor from the user's file runs many episodes on one event loop.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from openrlhf.agents.answers import CompletionOutput, EngineRefusal, Logprob, RequestOutput, packed
from openrlhf.agents.contract import AgentExecutorBase, ContractMistake
from openrlhf.agents.old_steps import executor_of_step
from openrlhf.isolation.loading import awaited, check_method, load_file, takes
from openrlhf.isolation.program import ASK, Ask
from openrlhf.reporting import notice
from openrlhf.rollout.sampling import Generation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESULT_KEYS = {
    "observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores", "extra_logs",
    "truncated", "turn_rewards", "notices", "earlier",
}  # fmt: skip
PARAMS = TypeAdapter(SamplingParams)
# vLLM sampling parameters that have no effect here.
IGNORED_PARAMS = {
    "detokenize", "output_kind", "flat_logprobs", "skip_clone", "output_text_buffer_length",
}  # fmt: skip

# For each vLLM parameter that `SamplingParams` lacks, the values that have no effect. For
# parameters that are not listed, None has no effect.
NEUTRAL_PARAMS = {"n": 1, "bad_words": [], "spaces_between_special_tokens": True}


class EngineProxy:
    """An episode's engine, which requests samples from the process that owns the process pool."""

    def __init__(
        self, ask: Ask, params: SamplingParams, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> None:
        self._ask = ask
        self._params = params
        self._tokenizer = tokenizer
        self.max_model_len = max_length

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any = None, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Return one sample (see `contract.Engine`). May be awaited in any thread's event loop."""
        if multi_modal_data:
            raise EngineRefusal("multi_modal_data is set, but the policy only reads text")
        prompt = [int(token) for token in prompt_token_ids]
        if sampling_params is None:
            sampling_params = self._params
        params = own_params(sampling_params)
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise EngineRefusal(
                f"the prompt has {len(prompt)} tokens; it must have 1 to {self.max_model_len - 1} "
                "(--data.max_len)"
            )
        params.max_tokens = min(room, params.max_tokens or room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        # As bytes, because every question is kept until the episode ends.
        question = {"prompt": packed(prompt), "params": asdict(params)}
        generation: Generation | str = await self._ask(question)
        if isinstance(generation, str):
            raise EngineRefusal(generation)
        logprobs = None
        if params.logprobs is not None:
            sampled = zip(generation.tokens, generation.logprobs, strict=True)
            logprobs = [{token: Logprob(logprob=logprob)} for token, logprob in sampled]
        output = CompletionOutput(
            index=0,
            text=self._text(generation, params),
            token_ids=generation.tokens,
            logprobs=logprobs,
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
        )
        return RequestOutput(prompt_token_ids=prompt, outputs=[output])

    def _text(self, generation: Generation, params: SamplingParams) -> str:
        """Return the sample's text with special tokens, excluding its end token or stop string."""
        tokens = generation.tokens
        if isinstance(generation.stop_reason, str):
            return generation.text
        if generation.finish_reason == "stop" and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens))


def own_params(params: Any) -> SamplingParams:
    """Copy sampling parameters (our class, vLLM's class or a dict) to a new `SamplingParams`.

    Raises EngineRefusal for values of the wrong type and for unsupported vLLM parameters that are
    set.
    """
    if isinstance(params, Mapping):
        params = SamplingParams(**params)
    supported = {field.name for field in fields(SamplingParams)}
    default = type(params)()
    values: dict[str, Any] = {}
    for name in getattr(params, "__struct_fields__", vars(params)):
        value = getattr(params, name)
        if isinstance(value, int) and abs(value) >> 63:
            raise EngineRefusal(f"sampling_params.{name} is {value}, not a 64-bit integer")
        if name in supported:
            values[name] = value
            continue
        ignored = name.startswith("_") or name in IGNORED_PARAMS
        if not ignored and value != getattr(default, name, NEUTRAL_PARAMS.get(name)):
            raise EngineRefusal(
                f"the sampling parameter {name} is not supported, only {sorted(supported)}"
            )
    try:
        return PARAMS.validate_python(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise EngineRefusal(
            f"sampling_params.{problem['loc'][0]} is {problem['input']!r}: {problem['msg']}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """This process's executor, and the arguments that all of its episodes share."""

    executor: AgentExecutorBase
    tokenizer: PreTrainedTokenizerBase
    max_length: int


_loaded: _Loaded


def start(path: str, tokenizer: bytes, max_length: int, max_turns: int | None) -> None:
    """Load the user's file before the first episode. Raises the same errors as `load_executor`."""
    from transformers.dynamic_module_utils import init_hf_modules  # slow import

    global _loaded
    init_hf_modules()  # makes tokenizer code from the model's repository importable
    _loaded = _Loaded(
        tokenizer=pickle.loads(tokenizer),
        executor=load_executor(Path(path)),
        max_length=max_length,
    )
    if _loaded.executor.needs_chat_template and not _loaded.tokenizer.chat_template:
        raise TypeError(
            f"{path} sends chat messages to the policy, but {_loaded.tokenizer.name_or_path} has "
            "no chat template. Add a chat_template.jinja to the model's folder"
        )
    if max_turns is not None:
        _loaded.executor.max_turns = max_turns


async def play(prompt: str, label: Any, params: SamplingParams, images: Any) -> dict[str, Any]:
    """Run one episode, and return the entries of the executor's result that the run uses."""
    arguments = {
        "prompt": prompt,
        "label": label,
        "sampling_params": params,
        "max_length": _loaded.max_length,
        "hf_tokenizer": _loaded.tokenizer,
        "llm_engine": EngineProxy(ASK.get(), params, _loaded.tokenizer, _loaded.max_length),
    }
    execute = _loaded.executor.execute
    if takes(execute, "images"):
        arguments["images"] = images
    result = await awaited(execute(**arguments))
    if not isinstance(result, Mapping):
        raise ContractMistake(f"execute returned {type(result).__qualname__}, not a dict")
    return {name: value for name, value in result.items() if name in RESULT_KEYS}


def load_executor(path: Path) -> AgentExecutorBase:
    """Return the executor defined in a user's file.

    Raises TypeError, with a suggested fix, if the file defines no valid executor.
    """
    module = load_file(path)
    kind = getattr(module, "AgentExecutor", None)
    if kind is None and inspect.iscoroutinefunction(getattr(module, "step", None)):
        notice(
            f"{path} defines a function step, as required by releases up to 0.8.6. The "
            "function will be wrapped."
        )
        return executor_of_step(module.step)
    if not (inspect.isclass(kind) and issubclass(kind, AgentExecutorBase)):
        own: list[str] = []
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                own.append(name)
        raise TypeError(
            f"{path} defines no class AgentExecutor that subclasses AgentExecutorBase; its classes "
            f"are: {', '.join(own) or 'none'}. To use an AgentInstanceBase, write\n"
            "    class AgentExecutor(MultiTurnAgentExecutor):\n"
            "        def __init__(self):\n"
            "            super().__init__(YourAgentInstance)"
        )
    named = [*inspect.signature(AgentExecutorBase.execute).parameters][1:]
    if not takes(kind.execute, "images"):
        named.remove("images")
    is_old = "result_queue" in inspect.signature(kind).parameters
    if is_old and not takes(kind.execute, "llm_engine"):
        raise TypeError(
            f"{path} was written for releases 0.8.7 to 0.9.0. Remove the arguments of its class, "
            f"change its method to\n    async def execute(self, {', '.join(named)})\n"
            "and return the dict that it now puts on self.result_queue. Or subclass "
            "MultiTurnAgentExecutor and call\n    super().__init__(YourAgentInstance)"
        )
    check_method(kind, "execute", named=named)
    return kind()
