"""What runs in a process of agents: one executor of the user's, many episodes at once on one event
loop.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.agents.answers import CompletionOutput, EngineRefusal, Logprob, RequestOutput
from openrlhf.agents.contract import AgentExecutorBase, ContractMistake
from openrlhf.agents.old_steps import executor_of_step
from openrlhf.isolation.loading import awaited, is_required, load_file, takes
from openrlhf.isolation.program import ASK, Ask
from openrlhf.rollout.sampling import Generation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASS = "AgentExecutor"
RESULT = {
    "observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores", "extra_logs", "truncated",
    "turn_rewards", "notices", "earlier",
}  # fmt: skip
OLD_QUEUE = (
    "is written for releases 0.8.7 to 0.9.0. Let its class take no arguments, let its method be\n"
    "    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None)\n"
    "and return the dict that it puts on self.result_queue; or derive from MultiTurnAgentExecutor and call\n"
    "    super().__init__(YourAgentInstance)"
)


class EngineProxy:
    """The engine as one episode sees it; the samples come from the process that started this one."""

    def __init__(
        self, ask: Ask, params: SamplingParams, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> None:
        self._ask, self._params, self._tokenizer = ask, params, tokenizer
        self.max_model_len = max_length

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any = None, multi_modal_data: Any = None
    ) -> RequestOutput:
        """One sample; see `agents.Engine`. May be awaited on any thread's event loop."""
        if multi_modal_data:
            raise EngineRefusal("multi_modal_data is given, but the policy reads text only")
        prompt = [int(token) for token in prompt_token_ids]
        params = own_params(self._params if sampling_params is None else sampling_params)
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise EngineRefusal(
                f"a prompt of {len(prompt)} tokens: 1 to {self.max_model_len - 1} fit (--data.max_len)"
            )
        params.max_tokens = min(room, params.max_tokens or room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        generation: Generation | str = await self._ask({"prompt": prompt, "params": asdict(params)})
        if isinstance(generation, str):
            raise EngineRefusal(generation)
        chosen = zip(generation.tokens, generation.logprobs, strict=True)
        output = CompletionOutput(
            index=0,
            text=self._text(generation, params),
            token_ids=generation.tokens,
            logprobs=None
            if params.logprobs is None
            else [{t: Logprob(logprob=number)} for t, number in chosen],
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
        )
        return RequestOutput(prompt_token_ids=prompt, outputs=[output])

    def _text(self, generation: Generation, params: SamplingParams) -> str:
        """The sample's text with its special tokens, without the token or text that ended it."""
        if generation.text is not None and isinstance(generation.stop_reason, str):
            return generation.text
        ended = generation.finish_reason == "stop" and not isinstance(generation.stop_reason, str)
        tokens = (
            generation.tokens[:-1]
            if ended and not params.include_stop_str_in_output
            else generation.tokens
        )
        return str(self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens))


def own_params(params: Any) -> SamplingParams:
    """A copy in our own class. Raises EngineRefusal if it is of vLLM's class and asks for what is
    not passed on.
    """
    if isinstance(params, Mapping):
        params = SamplingParams(**params)
    ours = {f.name for f in fields(SamplingParams)}
    if not isinstance(params, SamplingParams):
        ignored = {"detokenize", "output_kind", "flat_logprobs", "skip_clone"}
        default = type(params)()
        names = [
            n for n in getattr(params, "__struct_fields__", vars(params)) if not n.startswith("_")
        ]
        if other := [
            n
            for n in names
            if n not in ours | ignored and getattr(params, n) != getattr(default, n, None)
        ]:
            raise EngineRefusal(
                f"sampling parameters {other} are not passed on; the ones that are: {sorted(ours)}"
            )
    own = SamplingParams(**{name: getattr(params, name) for name in ours if hasattr(params, name)})
    for field in fields(own):
        value = getattr(own, field.name)
        if field.type is float and (isinstance(value, bool) or not hasattr(value, "__float__")):
            raise EngineRefusal(f"sampling_params.{field.name} is {value!r}, which is no number")
        unset = value is None and field.type == int | None
        if (
            field.type in (int, int | None)
            and not unset
            and (type(value) is not int or abs(value) >> 63)
        ):
            raise EngineRefusal(
                f"sampling_params.{field.name} is {value!r}, which is no integer of 64 bits"
            )
    return own


class Stage:
    """The executor of this process, and what its episodes are given."""

    executor: AgentExecutorBase
    tokenizer: PreTrainedTokenizerBase
    max_length: int


def start(path: str, tokenizer: bytes, max_length: int, max_turns: int | None) -> None:
    """Load the user's file. Raises what is wrong with it."""
    from transformers.dynamic_module_utils import init_hf_modules  # heavy

    init_hf_modules()  # makes the code of a tokenizer that came with its model importable
    Stage.tokenizer, Stage.max_length = pickle.loads(tokenizer), max_length
    Stage.executor = load_executor(Path(path))
    if Stage.executor.needs_chat_template and not Stage.tokenizer.chat_template:
        raise TypeError(
            f"{path} speaks to the policy in messages, but {Stage.tokenizer.name_or_path} has no chat template: "
            "put one, as chat_template.jinja, into the model's folder"
        )
    if max_turns is not None:
        Stage.executor.max_turns = max_turns


async def play(prompt: str, label: Any, params: SamplingParams, images: Any) -> dict[str, Any]:
    """One episode: the part of the executor's result that is read."""
    arguments = {
        "prompt": prompt,
        "label": label,
        "sampling_params": params,
        "max_length": Stage.max_length,
        "hf_tokenizer": Stage.tokenizer,
        "llm_engine": EngineProxy(ASK.get(), params, Stage.tokenizer, Stage.max_length),
    }
    if takes(Stage.executor.execute, "images"):
        arguments["images"] = images
    result = await awaited(Stage.executor.execute(**arguments))
    if not isinstance(result, Mapping):
        raise ContractMistake(f"execute returned {type(result).__qualname__}, not a dict")
    return {name: value for name, value in result.items() if name in RESULT}


def load_executor(path: Path) -> AgentExecutorBase:
    """The executor of a user's file. Raises TypeError or AttributeError, which say what is wrong
    with the file.
    """
    module = load_file(path)
    kind = getattr(module, CLASS, None)
    if kind is None and inspect.iscoroutinefunction(getattr(module, "step", None)):
        print(
            f"[notice] {path} has the form of releases up to 0.8.6, a function step: it is wrapped.",
            file=sys.stderr,
        )
        return executor_of_step(module.step)
    if kind is None:
        own = [
            n
            for n, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise AttributeError(
            f"{path} has no class {CLASS}; its classes are: {', '.join(own) or 'none'}. Around an AgentInstanceBase, write\n"
            "    class AgentExecutor(MultiTurnAgentExecutor):\n"
            "        def __init__(self):\n"
            "            super().__init__(YourAgentInstance)"
        )
    if not (inspect.isclass(kind) and issubclass(kind, AgentExecutorBase)):
        raise TypeError(
            f"{path}: {CLASS} must be a subclass of openrlhf.utils.agent.AgentExecutorBase"
        )
    if not takes(kind.execute, "llm_engine"):
        raise TypeError(f"{path} {OLD_QUEUE}")
    if missing := [p.name for p in inspect.signature(kind).parameters.values() if is_required(p)]:
        raise TypeError(
            f"{path}: {CLASS} is made without arguments, but its __init__ asks for {missing}"
        )
    return kind()
