"""The program of an agent host: one executor of the user's, many episodes at once on one event loop.

`AgentHost` starts it as `python -m openrlhf.agents.host_program SOCKET LIFELINE MEMORY_BYTES UID`. Requests come pickled, what
goes out is marshalled, as in `host_process`:

    in   start     the user's file, the tokenizer, limits       out  started
         episode   a prompt to run an episode of                     generate  an episode asks for a sample
         generated that sample, or why there is none                 done      the episode's result, or its error
         cancel    an episode has run out of time
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import marshal
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.agents.answers import CompletionOutput, EngineRefusal, Logprob, RequestOutput
from openrlhf.agents.contract import AgentExecutorBase, awaited
from openrlhf.agents.old_steps import executor_of_step
from openrlhf.processes.host import MAX_REPLY_BYTES
from openrlhf.processes.host_process import LENGTH, failure_of, load_file, main, plain, told
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trajectory import Failure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASS = "AgentExecutor"
THREADS = 256  # for episodes that wait in `asyncio.to_thread`, those of late ones that hang there included
STACK_BYTES = 2 << 20  # of each, which count towards the host's memory
OLD_QUEUE = (
    "is written for releases 0.8.7 to 0.9.0. Let its class take no arguments, let its method be\n"
    "    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None)\n"
    "and return the dict that it puts on self.result_queue; or derive from MultiTurnAgentExecutor and call\n"
    "    super().__init__(YourAgentInstance)"
)


class EngineProxy:
    """The engine as one episode sees it; the samples come from the process that started the host."""

    def __init__(self, host: Host, episode: int, params: SamplingParams) -> None:
        self._host, self._episode, self._params = host, episode, params
        self.max_model_len = host.max_length

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any = None, multi_modal_data: Any = None
    ) -> RequestOutput:
        """One sample; see `agents.Engine`."""
        if multi_modal_data:
            raise EngineRefusal("multi_modal_data is given, but the policy reads text only")
        prompt = [int(token) for token in prompt_token_ids]
        params = own_params(self._params if sampling_params is None else sampling_params)
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise EngineRefusal(f"a prompt of {len(prompt)} tokens: 1 to {self.max_model_len - 1} fit (--data.max_len)")
        params.max_tokens = min(room, params.max_tokens or room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        generation = await self._host.ask_engine(self._episode, prompt, params)
        chosen = zip(generation.tokens, generation.logprobs, strict=True)
        output = CompletionOutput(
            index=0,
            text=self._text(generation, params),
            token_ids=generation.tokens,
            logprobs=None
            if params.logprobs is None
            else [{token: Logprob(logprob=number)} for token, number in chosen],
            finish_reason=generation.finish_reason,
            stop_reason=generation.stop_reason,
        )
        return RequestOutput(prompt_token_ids=prompt, outputs=[output])

    def _text(self, generation: Generation, params: SamplingParams) -> str:
        """Special tokens kept, what ended the sample left out."""
        if generation.text is not None and isinstance(generation.stop_reason, str):
            return generation.text
        ended = generation.finish_reason == "stop" and not isinstance(generation.stop_reason, str)
        tokens = generation.tokens[:-1] if ended and not params.include_stop_str_in_output else generation.tokens
        return str(self._host.tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens))


def own_params(params: Any) -> SamplingParams:
    """A copy in our own class. Raises EngineRefusal where it asks, in vLLM's class, for what we do not pass on."""
    if isinstance(params, Mapping):
        params = SamplingParams(**params)
    ours = {f.name for f in fields(SamplingParams)}
    if not isinstance(params, SamplingParams):
        ignored = {"detokenize", "output_kind", "flat_logprobs", "skip_clone"}
        default = type(params)()
        names = [n for n in getattr(params, "__struct_fields__", vars(params)) if not n.startswith("_")]
        if other := [n for n in names if n not in ours | ignored and getattr(params, n) != getattr(default, n, None)]:
            raise EngineRefusal(f"sampling parameters {other} are not passed on; those that are: {sorted(ours)}")
    own = SamplingParams(**{name: getattr(params, name) for name in ours if hasattr(params, name)})
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(own, name)
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise EngineRefusal(f"sampling_params.{name} is {value!r}, which is no number")
    for name in ("top_k", "max_tokens", "min_tokens", "seed", "logprobs"):
        value = getattr(own, name)
        unset = value is None and name in ("max_tokens", "seed", "logprobs")
        if not unset and (type(value) is not int or abs(value) >> 63):
            raise EngineRefusal(f"sampling_params.{name} is {value!r}, which is no integer of 64 bits")
    return own


class Host:
    """The executor, the episodes under way, and the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._process = channel, os.getpid()
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, asyncio.Future[Generation]] = {}
        self._numbers = itertools.count()
        self.executor: AgentExecutorBase
        self.tokenizer: PreTrainedTokenizerBase
        self.max_length = 0

    async def serve(self) -> None:
        """Answer requests until the other end is gone."""
        self._loop = asyncio.get_running_loop()
        threading.stack_size(STACK_BYTES)
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS))
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        handlers = {
            "start": self._start,
            "episode": self._begin,
            "generated": self._generated,
            "cancel": lambda episode: self._episodes[episode].cancel() if episode in self._episodes else None,
        }
        while header := await reader.read(1):
            header += await reader.readexactly(LENGTH.size - 1)
            request = pickle.loads(await reader.readexactly(*LENGTH.unpack(header)))
            handlers[request.pop("kind")](**request)

    def _send(self, **message: Any) -> None:
        if os.getpid() != self._process:  # user code forked, and the copy came here too
            os._exit(0)
        data = marshal.dumps(message)
        if len(data) > MAX_REPLY_BYTES:
            raise ValueError(f"returned {len(data):,} bytes, more than the {MAX_REPLY_BYTES:,} a host may send")
        self._writer.write(LENGTH.pack(len(data)) + data)

    def _start(self, path: str, tokenizer: bytes, max_length: int, max_turns: int | None) -> None:
        try:
            self.tokenizer = _unpickled_tokenizer(tokenizer)
            self.executor = load_executor(Path(path))
            if self.executor.needs_chat_template and not self.tokenizer.chat_template:
                raise TypeError(
                    f"{path} speaks to the policy in messages, but {self.tokenizer.name_or_path} has no chat template: "
                    "put one, as chat_template.jinja, into the model's folder"
                )
            self.max_length = max_length
            if max_turns is not None:
                self.executor.max_turns = max_turns
            self._send(kind="started", error=None)
        except BaseException as error:
            self._send(kind="started", error=told(error))

    def _begin(self, episode: int, prompt: str, label: Any, params: SamplingParams, images: Any) -> None:
        run = self._run(episode, prompt, label, params, images)
        self._episodes[episode] = self._loop.create_task(run)

    async def _run(self, episode: int, prompt: str, label: Any, params: SamplingParams, images: Any) -> None:
        failure = Failure.EXCEPTION
        try:
            arguments = {
                "prompt": prompt,
                "label": label,
                "sampling_params": params,
                "max_length": self.max_length,
                "hf_tokenizer": self.tokenizer,
                "llm_engine": EngineProxy(self, episode, params),
                "images": images,
            }
            result = await awaited(self.executor.execute(**_accepted(self.executor.execute, arguments)))
            failure = Failure.RESULT
            if not isinstance(result, Mapping):
                raise TypeError(f"execute returned {type(result).__qualname__}, not a dict")
            wanted = {name: plain(value) for name, value in result.items() if name in RESULT}
            self._send(kind="done", episode=episode, result=wanted)
        except BaseException as error:
            failure = failure_of(error, failure)
            broken = failure in (Failure.MEMORY, Failure.EXIT)
            self._send(kind="done", episode=episode, error=told(error), failure=str(failure), broken=broken)
        finally:
            self._episodes.pop(episode, None)

    async def ask_engine(self, episode: int, prompt: list[int], params: SamplingParams) -> Generation:
        """A sample for an episode."""
        if asyncio.get_running_loop() is not self._loop:
            raise EngineRefusal("generate is awaited on an event loop of another thread: await it where execute runs")
        call = next(self._numbers)
        self._answers[call] = answer = self._loop.create_future()
        try:
            self._send(kind="generate", episode=episode, call=call, prompt=prompt, params=plain(asdict(params)))
            return await answer
        finally:
            del self._answers[call]

    def _generated(self, call: int, generation: Generation | None, error: str | None) -> None:
        answer = self._answers.get(call)
        if answer is None or answer.done():  # its episode gave up
            return
        if generation is None:
            answer.set_exception(EngineRefusal(error))
        else:
            answer.set_result(generation)


RESULT = {
    "observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores", "extra_logs", "truncated",
    "turn_rewards",
}  # fmt: skip


def _unpickled_tokenizer(data: bytes) -> PreTrainedTokenizerBase:
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()  # where the code of a tokenizer that came with its model is found
    return pickle.loads(data)


def load_executor(path: Path) -> AgentExecutorBase:
    """The executor of a user's file. Raises TypeError or AttributeError that say what is wrong with the file."""
    module = load_file(path)
    kind = getattr(module, CLASS, None)
    if kind is None and inspect.iscoroutinefunction(getattr(module, "step", None)):
        print(f"[notice] {path} has the form of releases up to 0.8.6, a function step: it is wrapped.", file=sys.stderr)
        return executor_of_step(module.step)
    if kind is None:
        own = [n for n, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        raise AttributeError(
            f"{path} has no class {CLASS}; its classes are: {', '.join(own) or 'none'}. Around an AgentInstanceBase, write\n"
            "    class AgentExecutor(MultiTurnAgentExecutor):\n"
            "        def __init__(self):\n"
            "            super().__init__(YourAgentInstance)"
        )
    if not (inspect.isclass(kind) and issubclass(kind, AgentExecutorBase)):
        raise TypeError(f"{path}: {CLASS} must be a subclass of openrlhf.utils.agent.AgentExecutorBase")
    execute = inspect.signature(kind.execute).parameters
    if "llm_engine" not in execute and not any(p.kind is p.VAR_KEYWORD for p in execute.values()):
        raise TypeError(f"{path} {OLD_QUEUE}")
    if missing := [p.name for p in inspect.signature(kind).parameters.values() if _is_required(p)]:
        raise TypeError(f"{path}: {CLASS} is made without arguments, but its __init__ asks for {missing}")
    return kind()


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variable


def _accepted(execute: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Without `images` where the method has no such parameter."""
    parameters = inspect.signature(execute).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in arguments.items() if name != "images" or takes_any or name in parameters}


def serve(channel: socket.socket) -> None:
    """Run the program."""
    with asyncio.Runner() as runner:
        try:
            runner.run(Host(channel).serve())
        except SystemExit as end:  # of a task or callback of user code; before the episodes of others are cancelled
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]), serve=serve)
