"""Agents of releases 0.8.0 to 0.8.6: a function `step`, wrapped into today's contract."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from openrlhf.agents.contract import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.isolation.loading import takes


def executor_of_step(step: Callable[..., Awaitable[Any]]) -> AgentExecutorBase:
    """An executor around `async def step(observation, action, label, **kwargs)`.

    It returns (reward, next text, done, anything), or a dict with `rewards`, `next_observation` or
    `next_state`, `done`, and optionally `scores`, `sampling_params`, `extra_logs`. The next text is
    all of it: what came before, and the feedback.
    """

    class Instance(AgentInstanceBase):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            observation, action = states["observation_text"], states["action_text"]
            more = (
                {"sampling_params": states["sampling_params"]}
                if takes(step, "sampling_params")
                else {}
            )
            answer = await step(observation, action, states["label"], **more)
            if not isinstance(answer, Mapping):
                reward, following, done, *_ = answer
                answer = {"rewards": reward, "next_state": following, "done": done}
            following = str(answer.get("next_observation", answer.get("next_state")) or "")
            said = observation + action
            if not following.startswith(said) and not answer["done"]:
                raise ValueError(
                    "step returned a next text that does not begin with the text so far, and what the policy has said "
                    f"cannot be unsaid:\n{following[:200]!r}\ndoes not begin with\n{said[:200]!r}"
                )
            feedback = following.removeprefix(said) if following.startswith(said) else ""
            return {**answer, "environment_feedback": feedback}

    return MultiTurnAgentExecutor(Instance)
