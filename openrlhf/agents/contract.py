"""The interface for user agents: episode executors and multi-turn environments.

The --train.agent_func_path file defines a class `AgentExecutor` that subclasses one of these
executors. Each agent process has one instance, which runs many episodes concurrently. The public
import path of these names is `openrlhf.utils.agent`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure
from openrlhf.data.continuation import encode_after, encode_text
from openrlhf.isolation.loading import awaited, check_method, load_function, parameters_of, plain
from openrlhf.rewards.function import Arguments
from openrlhf.rewards.protocol import RewardRequest, RewardResult, numbers, read_rewards
from openrlhf.rewards.rule import HTTPReward
from openrlhf.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.agents.answers import CompletionOutput, RequestOutput


class Engine(Protocol):
    """An engine with the latest published policy weights, from which an executor samples."""

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any = None, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Return one sample that continues the prompt.

        Raises EngineRefusal if the engine cannot serve the request.
        """
        ...


class AgentExecutorBase(ABC):
    """An executor, constructed without arguments. Each call to `execute` runs one episode.

    `max_turns` is the value of --rollout.max_turns, if it is set.
    """

    max_turns: int | None = None
    needs_chat_template = False

    @abstractmethod
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
        """Run one episode of at most `max_length` tokens.

        This method is called with keyword arguments.

        Returns a dict with

        - `prompt`, `label`: the arguments;
        - `observation_tokens`: the token ids of the entire episode, including the prompt;
        - `action_ranges`: [start, end) of the tokens that the policy sampled;
        - `rollout_log_probs`: log-probabilities of the sampled tokens, 0.0 for other tokens; if
          None, the log-probabilities that the engine returned are used;
        - `reward`, `scores`, `extra_logs` (optional): without a reward, a reward model scores the
          episode;
        - `truncated` (optional): whether the episode ran out of tokens or turns;
        - `turn_rewards` (optional): one number per action range; `reward` defaults to their sum;
        - `earlier` (optional): the episode's previous conversations, which share its reward, as
          dicts with `observation_tokens` and `action_ranges`.
        """


class AgentInstanceBase(ABC):
    """The environment of one episode. Each episode creates a new instance."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Start the episode, whose prompt is `states["observation"]`.

        To change the prompt, return a dict with a different `observation`.
        """
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Respond to the policy's action.

        `states` has `observation_text` (the conversation before the action), `action_text`,
        `label`, `sampling_params`, `turn` (from 0), and two entries that describe how the action
        ended. `finish_reason` is "stop" if the policy ended its action, "length" if it was
        truncated. `end_text` is the end-of-turn text, such as "<|im_end|>", which is not part of
        `action_text`; `end_text` is empty if the action was truncated.

        Returns `rewards` for this turn, `environment_feedback` (the text that follows) and `done`;
        optionally `scores`, `extra_logs`, and `sampling_params` for later turns.
        """

    async def close(self) -> None:  # noqa: B027 — most environments have nothing to close
        """Clean up after the episode, even if it failed."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """An executor for episodes in which the policy and an environment take turns.

    An episode ends when the environment is done or the episode runs out of tokens or turns. Each
    turn samples at most `sampling_params.max_tokens` tokens. Sampled tokens are kept unchanged;
    only the environment's text is tokenized. With `turn_rewards`, each turn is credited with its
    own reward instead of the sum.
    """

    def __init__(
        self,
        agent_instance_cls: type[AgentInstanceBase],
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        turn_rewards: bool = False,
    ) -> None:
        is_subclass = inspect.isclass(agent_instance_cls) and issubclass(
            agent_instance_cls, AgentInstanceBase
        )
        if not is_subclass or agent_instance_cls.__abstractmethods__:
            raise TypeError(
                f"{agent_instance_cls!r} must be a subclass of AgentInstanceBase that defines step"
            )
        # A subclass may override the methods below and call its environment in its own way.
        if type(self).execute is MultiTurnAgentExecutor.execute:
            check_method(agent_instance_cls, "reset", "states")
            if type(self)._take_turns is MultiTurnAgentExecutor._take_turns:
                check_method(agent_instance_cls, "step", "states")
        self.agent_instance_cls = agent_instance_cls
        self.env_kwargs = env_kwargs or {}
        self.turn_rewards = turn_rewards

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
        """Run one episode in a new environment, which is closed even if the episode fails."""
        agent = await _new(self.agent_instance_cls, self.env_kwargs)
        try:
            first = await awaited(agent.reset({"observation": prompt, "label": label}))
            if not isinstance(first, Mapping) or not isinstance(first.get("observation"), str):
                raise ContractMistake(
                    f"{type(agent).__name__}.reset returned {first!r}; "
                    "it must return a dict whose observation is a string"
                )
            episode = _Episode(
                first["observation"], sampling_params, max_length, hf_tokenizer, llm_engine
            )
            await self._take_turns(agent, episode, label)
        finally:
            await awaited(agent.close())
        reward = sum(episode.rewards)
        score = episode.score
        if score is None:
            score = reward
        result = {
            "prompt": prompt,
            "label": label,
            **episode.result(),
            "reward": reward,
            "scores": score,
            "extra_logs": episode.logs,
        }
        if self.turn_rewards:
            result["turn_rewards"] = episode.rewards
        return result

    async def _take_turns(self, agent: AgentInstanceBase, episode: _Episode, label: Any) -> None:
        params = episode.params
        while episode.room > 0 and (self.max_turns is None or len(episode.ranges) < self.max_turns):
            states = {
                "observation_text": episode.text,
                "label": label,
                "sampling_params": copy.copy(params),
                "turn": len(episode.ranges),
            }
            output = await episode.act(params)
            states |= {
                "action_text": output.text,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "end_text": episode.end_text,
            }
            returned = await awaited(agent.step(states))
            episode.observe(returned, step=f"{type(agent).__name__}.step")
            if returned["done"]:
                return
            params = returned.get("sampling_params") or params
        episode.truncated = True


class _Episode:
    """An episode's tokens and text so far.

    If the prompt is too long, its first tokens are dropped to leave room for one action.
    """

    def __init__(
        self,
        text: str,
        params: SamplingParams,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
    ) -> None:
        self.text = text
        self.params = params
        self.max_length = max_length
        self.tokenizer = tokenizer
        self.engine = engine
        prompt_room = max(1, max_length - (params.max_tokens or 1))
        self.tokens = encode_text(tokenizer, text)[-prompt_room:]
        self.ranges: list[tuple[int, int]] = []
        self.outputs: list[CompletionOutput] = []  # one per range
        self.rewards: list[float] = []  # one per turn
        self.score: float | None = None  # score of the last turn that has a score
        self.logs: dict[str, Any] = {}
        self.truncated = False
        self.end_text = ""  # the last action's end-of-turn text, which `text` omits
        self.notices: dict[str, str] = {}

    @property
    def room(self) -> int:
        """The number of tokens left in the context."""
        return self.max_length - len(self.tokens)

    async def act(self, params: SamplingParams) -> CompletionOutput:
        """Sample an action that fits into the remaining context, and append it."""
        bounded = copy.copy(params)
        bounded.max_tokens = min(self.room, params.max_tokens or self.room)
        request = await self.engine.generate(list(self.tokens), bounded)
        output = request.outputs[0]
        start = len(self.tokens)
        self.truncated = output.is_cut(start, self.max_length, self.params.max_tokens)
        self.end_text = self._end_of(output)
        self.tokens += output.token_ids
        self.ranges.append((start, len(self.tokens)))
        self.outputs.append(output)
        self.text += output.text
        return output

    def _end_of(self, output: CompletionOutput) -> str:
        """Return the stop string or the text of the stop token that ended an action."""
        if output.finish_reason != "stop":
            return ""
        if isinstance(output.stop_reason, str):
            return output.stop_reason
        return str(self.tokenizer.decode(output.token_ids[-1:], skip_special_tokens=False))

    def observe(self, returned: Any, *, step: str) -> None:
        """Append the environment's feedback, and record its rewards and logs.

        `returned` is the return value of `step`. Raises ContractMistake if an entry is missing or
        invalid.
        """
        _check_entries(returned, step)
        self.rewards.append(_number(returned, "rewards", step))
        if returned.get("scores") is not None:
            self.score = _number(returned, "scores", step)
        self.logs |= returned.get("extra_logs") or {}
        feedback: str = returned.get("environment_feedback") or ""
        self.text += feedback
        if self.end_text and feedback.startswith(self.end_text):
            feedback = feedback.removeprefix(self.end_text)
            self.notices["end"] = (
                f"environment_feedback begins with {self.end_text!r}. The policy already sampled "
                "this end-of-turn text, so it is not added again. In step, "
                "states['end_text'] is the text that ended the action"
            )
        continuation = encode_after(self.tokenizer, self.tokens, feedback)
        self.tokens += continuation.tokens
        if not continuation.exact:
            self.notices["border"] = (
                f"the tokenizer would merge the start of environment_feedback {feedback[:20]!r} "
                "with the end of the action. The action keeps its sampled tokens"
            )

    def result(self) -> dict[str, Any]:
        """Return the entries of `execute`'s result that describe tokens."""
        return {
            "observation_tokens": self.tokens,
            "action_ranges": self.ranges,
            "rollout_log_probs": self._logprobs(),
            "truncated": self.truncated,
            "notices": self.notices,
        }

    def _logprobs(self) -> list[float] | None:
        """Return the log-probabilities of the sampled tokens, or None if some are missing.

        A subclass that samples with its own engine needs these log-probabilities.
        """
        logprobs = [0.0] * len(self.tokens)
        for (start, _), output in zip(self.ranges, self.outputs, strict=True):
            if output.logprobs is None:
                return None
            sampled = zip(output.token_ids, output.logprobs, strict=True)
            for position, (token, candidates) in enumerate(sampled, start):
                logprobs[position] = candidates[token].logprob
        return logprobs


class SingleTurnAgentExecutor(AgentExecutorBase):
    """An executor for single-turn episodes.

    `remote_rm_url` is a file that defines `reward_func`, or one or more reward server URLs. If
    `remote_rm_url` is not set, the executor does not score the episodes.
    """

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        self.remote_rm_url = remote_rm_url
        sources = remote_rm_url or ""
        if not isinstance(sources, str):
            sources = ",".join(sources)
        self._rule = RuleConfig(remote_url=sources)
        if remote_rm_url is not None and not self._rule.sources:
            raise TypeError("remote_rm_url is empty: pass a .py file or server URLs, or omit it")
        self._servers = HTTPReward(self._rule)

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
        """Sample one response; if `remote_rm_url` is set, get the response's reward from there."""
        episode = _Episode(prompt, sampling_params, max_length, hf_tokenizer, llm_engine)
        await episode.act(sampling_params)
        result = {"prompt": prompt, "label": label, **episode.result()}
        if not self._rule.sources:
            return result
        query = str(episode.tokenizer.decode(episode.tokens, skip_special_tokens=False))
        reward = await self._reward(RewardRequest(query=query, prompt=prompt, label=label))
        return {
            **result,
            "reward": reward.reward,
            "scores": reward.score,
            "extra_logs": dict(reward.extra_logs),
        }

    async def _reward(self, request: RewardRequest) -> RewardResult:
        """Return the reward from a server, or from the file's `reward_func`, called in a thread.

        Raises ContractMistake.
        """
        if file := self._rule.function_path:
            source = f"{Path(file).resolve()}:reward_func"
            args, named = Arguments.for_parameters(parameters_of(source)).of([request])
            returned = await asyncio.to_thread(load_function(source), *args, **named)
            return read_rewards(plain(await awaited(returned)), 1)[0]
        [result] = await self._servers.score([request])
        if result.error is not None:
            raise ContractMistake(result.error, result.failure)
        return result


class ContractMistake(ValueError):
    """An error for an invalid value from an agent, its environment or its reward."""

    def __init__(self, message: str, failure: Failure | None = Failure.RESULT) -> None:
        super().__init__(message)
        self.failure = failure


def _check_entries(returned: Any, step: str) -> None:
    """Raise ContractMistake if the return value of `step` has missing or invalid entries."""
    expected = "it must return a dict with rewards, environment_feedback and done"
    if not isinstance(returned, Mapping):
        raise ContractMistake(f"{step} returned {returned!r}; {expected}")
    for name in ("rewards", "done"):
        if returned.get(name) is None:
            keys = ", ".join(map(str, returned))
            raise ContractMistake(f"{step} returned no {name} (its keys are: {keys}); {expected}")
    if returned.get("environment_images") is not None:
        raise ContractMistake(f"{step} returned environment_images; the policy only reads text")
    done = returned["done"]
    if not isinstance(done, int) and not hasattr(done, "item"):  # NumPy and PyTorch have `item`
        raise ContractMistake(f"{step} returned done {done!r}, not True or False")
    feedback = returned.get("environment_feedback")
    if not isinstance(feedback, str | None):
        raise ContractMistake(f"{step} returned environment_feedback {feedback!r}, not text")


def _number(returned: Mapping[str, Any], name: str, step: str) -> float:
    """Return a numeric entry of the return value of `step`."""
    value = returned[name]
    try:
        return numbers(name, plain(value), 1)[0]
    except ValueError:
        raise ContractMistake(f"{step} returned {name} {value!r}, not a single number") from None


async def _new(kind: type[AgentInstanceBase], arguments: Mapping[str, Any]) -> AgentInstanceBase:
    """Create an instance. The class's `__init__` may be `async def`, as in older examples."""
    if not inspect.iscoroutinefunction(kind.__init__):
        return kind(**arguments)
    instance = kind.__new__(kind)
    await kind.__init__(instance, **arguments)
    return instance
