"""What agents are written against: executors of episodes, and environments of several turns.

A file given as --train.agent_func_path has a class `AgentExecutor`, a subclass of one of these. It
runs in user processes, one instance in each, many episodes at once. The names are public as
`openrlhf.utils.agent`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.agents.continuation import encode, encode_after
from openrlhf.config.rollout import RuleConfig
from openrlhf.core.trajectory import Failure, TrajectoryBuilder
from openrlhf.isolation.loading import awaited, load_function, parameters_of, plain
from openrlhf.rewards.function import Arguments
from openrlhf.rewards.protocol import RewardRequest, RewardResult, numbers, read_rewards
from openrlhf.rewards.rule import HTTPReward
from openrlhf.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.agents.answers import CompletionOutput, RequestOutput


class Engine(Protocol):
    """What an executor samples with: the policy, at its newest published weights."""

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any = None, multi_modal_data: Any = None
    ) -> RequestOutput:
        """One sample that continues the prompt. Raises EngineRefusal if the engine cannot serve it."""
        ...


class AgentExecutorBase(ABC):
    """Runs episodes, each a call of `execute`. Constructed without arguments.

    `max_turns` is --rollout.max_turns, if it is given.
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
        """One episode of at most `max_length` tokens. Called with keyword arguments. Returns a dict
        with

        - `prompt`, `label`: as given;
        - `observation_tokens`: the ids of the whole episode, prompt and all that followed;
        - `action_ranges`: [start, end) of the tokens that the policy sampled;
        - `rollout_log_probs`: of the sampled tokens, 0.0 for others; None takes the log-probabilities that the engine gave;
        - `reward`, `scores`, `extra_logs` (optional): a reward model scores what has no reward;
        - `truncated` (optional): the episode ran out of tokens or turns;
        - `turn_rewards` (optional): a number per action range; `reward` is their sum by default;
        - `earlier` (optional): conversations before this one, which share its reward: dicts with `observation_tokens` and
          `action_ranges`.
        """


class AgentInstanceBase(ABC):
    """The environment of one episode. A fresh instance for each."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The episode begins with the prompt, `states["observation"]`; return a dict with another
        `observation` to change it.
        """
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The policy has acted: `observation_text` so far, then `action_text`; and `label`,
        `sampling_params`, `turn` from 0.

        `finish_reason` is "stop" if the policy ended its action, "length" if the action was cut.
        `end_text` is the text that ended the action and is not in `action_text`, such as
        "<|im_end|>"; it is empty for a cut action.

        Returns `rewards` of this turn, `environment_feedback` (text that follows), `done`; and
        optionally `scores`, `extra_logs`, and `sampling_params` for the turns that follow.
        """

    async def close(self) -> None:  # noqa: B027 — most environments have nothing to close
        """The episode is over, well or not."""


class _TextExecutor(AgentExecutorBase):
    """Plays an episode as a growing text."""

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
        """One episode, as `_play` plays it."""
        begin = partial(_Episode, sampling_params, max_length, hf_tokenizer, llm_engine)
        return {"prompt": prompt, "label": label, **await self._play(begin, prompt, label)}

    @abstractmethod
    async def _play(
        self, begin: Callable[[str], _Episode], prompt: str, label: Any
    ) -> dict[str, Any]:
        """The other entries of `execute`'s result. `begin` makes an episode that begins with a
        text.
        """


class MultiTurnAgentExecutor(_TextExecutor):
    """Lets the policy and an environment take turns until the environment is done, or there is no
    room or turn left.

    Each turn samples at most `sampling_params.max_tokens` tokens. What the policy sampled stays as
    it was sampled; only the environment's text is tokenised. With `turn_rewards` each turn is
    credited with its own reward, not with the sum.
    """

    def __init__(
        self,
        agent_instance_cls: type[AgentInstanceBase],
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        turn_rewards: bool = False,
    ) -> None:
        if not (
            inspect.isclass(agent_instance_cls)
            and issubclass(agent_instance_cls, AgentInstanceBase)
        ):
            raise TypeError(f"{agent_instance_cls!r} is no subclass of AgentInstanceBase")
        if lacking := sorted(agent_instance_cls.__abstractmethods__):
            raise TypeError(
                f"{agent_instance_cls.__name__} has no method {' and no '.join(lacking)}"
            )
        self.agent_instance_cls, self.env_kwargs, self.turn_rewards = (
            agent_instance_cls,
            env_kwargs or {},
            turn_rewards,
        )

    async def _play(
        self, begin: Callable[[str], _Episode], prompt: str, label: Any
    ) -> dict[str, Any]:
        """One episode in an environment of its own, which is closed at the end whatever happens."""
        agent = await _new(self.agent_instance_cls, self.env_kwargs)
        try:
            begun = await awaited(agent.reset({"observation": prompt, "label": label}))
            if not isinstance(begun, Mapping) or not isinstance(begun.get("observation"), str):
                raise ContractMistake(
                    f"{type(agent).__name__}.reset returned {begun!r}, not a dict with the text observation"
                )
            episode = begin(begun["observation"])
            await self._take_turns(agent, episode, label)
        finally:
            await awaited(agent.close())
        return {
            **episode.result(),
            "reward": sum(episode.rewards),
            "scores": sum(episode.rewards) if episode.score is None else episode.score,
            "extra_logs": episode.logs,
            **({"turn_rewards": episode.rewards} if self.turn_rewards else {}),
        }

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
            acted = {
                "action_text": output.text,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "end_text": episode.end_text,
            }
            answer = _checked(agent, await awaited(agent.step(states | acted)))
            episode.observe(answer)
            if answer["done"]:
                return
            params = answer.get("sampling_params") or params
        episode.truncated = True


class _Episode(TrajectoryBuilder):
    """What has been said so far, by tokens, beginning with the last tokens of `text` that leave
    room for an action.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        text: str,
    ) -> None:
        self.params, self.max_length, self.tokenizer, self.engine = (
            params,
            max_length,
            tokenizer,
            engine,
        )
        self.text = text
        super().__init__(encode(tokenizer, text)[-max(1, max_length - (params.max_tokens or 1)) :])
        self.ranges: list[tuple[int, int]] = []
        self.rewards: list[float] = []  # of each turn
        self.score: float | None = None
        self.logs: dict[str, Any] = {}
        self.truncated = False
        self.end_text = ""  # the text that ended the last action and is not in its text
        self.notices: dict[str, str] = {}

    @property
    def room(self) -> int:
        """Tokens that are left."""
        return self.max_length - len(self.tokens)

    async def act(self, params: SamplingParams) -> CompletionOutput:
        """Have the policy sample what follows, as far as there is room, and append it."""
        asked = copy.copy(params)
        asked.max_tokens = min(self.room, params.max_tokens or self.room)
        output = (await self.engine.generate(list(self.tokens), asked)).outputs[0]
        self.truncated = output.is_cut(len(self.tokens), self.max_length, self.params.max_tokens)
        self.end_text = self._end_of(output)
        sampled = list(output.token_ids)
        self.ranges.append((len(self.tokens), len(self.tokens) + len(sampled)))
        candidates = output.logprobs or [{} for _ in sampled]  # None: the engine's are taken
        found = [
            chosen[t].logprob if t in chosen else 0.0
            for t, chosen in zip(sampled, candidates, strict=True)
        ]
        self.append_action(sampled, found)
        self.text += output.text
        return output

    def _end_of(self, output: CompletionOutput) -> str:
        """Return the text that ended an action and is not in its text: a stop string, or the text
        of an end token.
        """
        if output.finish_reason != "stop":
            return ""
        if isinstance(output.stop_reason, str):
            return output.stop_reason
        return str(self.tokenizer.decode(output.token_ids[-1:], skip_special_tokens=False))

    def observe(self, answer: Mapping[str, Any]) -> None:
        """Append the environment's feedback, and keep its rewards and logs."""
        feedback: str = answer.get("environment_feedback") or ""
        self.text += feedback
        if self.end_text and feedback.startswith(self.end_text):
            feedback = feedback.removeprefix(self.end_text)
            self.notices["end"] = (
                f"environment_feedback begins with {self.end_text!r}, which the policy has already sampled to end its "
                "action, so it is not repeated. In step, states['end_text'] is the text that ended the action"
            )
        new = encode_after(self.tokenizer, self.tokens, feedback)
        self.append_feedback(new.tokens)
        if not new.exact:
            self.notices["border"] = (
                f"the tokenizer would merge the start of environment_feedback {feedback[:20]!r} with the end of the "
                "action. The action keeps its sampled tokens"
            )
        self.rewards += numbers("rewards", plain(answer["rewards"]), 1)
        if answer.get("scores") is not None:
            [self.score] = numbers("scores", plain(answer["scores"]), 1)
        self.logs |= answer.get("extra_logs") or {}

    def result(self) -> dict[str, Any]:
        """The episode's part of what `execute` returns."""
        return {
            "observation_tokens": self.tokens,
            "action_ranges": self.ranges,
            "rollout_log_probs": self.rollout_logprobs,
            "truncated": self.truncated,
            "notices": self.notices,
        }


class SingleTurnAgentExecutor(_TextExecutor):
    """One sample of the prompt. `remote_rm_url`: a file with `reward_func`, or servers; without it
    there is no reward yet.
    """

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        self.remote_rm_url = remote_rm_url
        sources = remote_rm_url if isinstance(remote_rm_url, str) else ",".join(remote_rm_url or [])
        self._rule = RuleConfig(remote_url=sources)
        if remote_rm_url is not None and not self._rule.sources:
            raise TypeError("remote_rm_url is empty: name a .py file or servers, or leave it out")
        self._servers = HTTPReward(self._rule)

    async def _play(
        self, begin: Callable[[str], _Episode], prompt: str, label: Any
    ) -> dict[str, Any]:
        """Sample once, and ask `remote_rm_url`, if it is given, for the reward."""
        episode = begin(prompt)
        await episode.act(episode.params)
        result = episode.result()
        if not self._rule.sources:
            return result
        query = str(episode.tokenizer.decode(episode.tokens, skip_special_tokens=False))
        reward = await self._reward(RewardRequest(query=query, prompt=prompt, label=label))
        return result | {
            "reward": reward.reward,
            "scores": reward.score,
            "extra_logs": dict(reward.extra_logs),
        }

    async def _reward(self, request: RewardRequest) -> RewardResult:
        """What the file's `reward_func` says, called in a thread of this process, or one of the
        servers. Raises ContractMistake.
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
    """An agent, its environment or its reward returned what it must not; the message says what, and
    what is expected.
    """

    def __init__(self, message: str, failure: Failure | None = Failure.RESULT) -> None:
        super().__init__(message)
        self.failure = failure


def _checked(agent: AgentInstanceBase, answer: Any) -> Mapping[str, Any]:
    """What `step` returned. Raises ContractMistake if something is missing or of the wrong type."""
    step, wanted = (
        f"{type(agent).__name__}.step",
        "a dict with rewards, environment_feedback and done",
    )
    if not isinstance(answer, Mapping):
        raise ContractMistake(f"{step} returned {answer!r}; it must return {wanted}")
    if missing := [name for name in ("rewards", "done") if answer.get(name) is None]:
        raise ContractMistake(
            f"{step} returned no {' and no '.join(missing)}; it must return {wanted}"
        )
    if not (isinstance(answer["done"], int) or hasattr(answer["done"], "item")):
        raise ContractMistake(
            f"{step} returned done {answer['done']!r}, which is neither True nor False"
        )
    if not isinstance(answer.get("environment_feedback"), str | None):
        raise ContractMistake(
            f"{step} returned environment_feedback {answer['environment_feedback']!r}, which is not text"
        )
    if answer.get("environment_images") is not None:
        raise ContractMistake(f"{step} returned environment_images; the policy reads text only")
    for name in (name for name in ("rewards", "scores") if answer.get(name) is not None):
        try:
            numbers(name, plain(answer[name]), 1)
        except ValueError:
            raise ContractMistake(
                f"{step} returned {name} {answer[name]!r}, which is not one number"
            ) from None
    return answer


async def _new(kind: type[AgentInstanceBase], arguments: Mapping[str, Any]) -> AgentInstanceBase:
    """An instance; its `__init__` may be `async def`, as examples of the contract once had it."""
    if not inspect.iscoroutinefunction(kind.__init__):
        return kind(**arguments)
    instance = kind.__new__(kind)
    await kind.__init__(instance, **arguments)
    return instance
