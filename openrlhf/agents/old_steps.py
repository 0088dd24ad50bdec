"""Wraps a `step` function, as written for releases 0.8.0 to 0.8.6, as an executor."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from openrlhf.agents.contract import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.isolation.loading import takes


def executor_of_step(step: Callable[..., Awaitable[Any]]) -> AgentExecutorBase:
    """Return an executor that calls `async def step(observation, action, label, **kwargs)`.

    `step` returns (reward, next text, done, info), or a dict with `rewards`, `next_observation`
    or `next_state`, `done`, and optionally `scores`, `sampling_params`, `extra_logs`. The next text
    consists of all text so far, followed by the feedback.
    """

    class Instance(AgentInstanceBase):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            text = states["observation_text"] + states["action_text"]
            options = {}
            if takes(step, "sampling_params"):
                options["sampling_params"] = states["sampling_params"]
            returned = await step(
                states["observation_text"], states["action_text"], states["label"], **options
            )
            if not isinstance(returned, Mapping):
                reward, next_text, done, *_ = returned
                returned = {"rewards": reward, "next_state": next_text, "done": done}
            next_text = str(returned.get("next_observation", returned.get("next_state")) or "")
            feedback = ""
            if next_text.startswith(text):
                feedback = next_text.removeprefix(text)
            elif not returned["done"]:
                raise ValueError(
                    "the next text that step returns must begin with the text so far, because the "
                    f"policy's tokens cannot be changed:\n{next_text[:200]!r}\n"
                    f"does not begin with\n{text[:200]!r}"
                )
            return {**returned, "environment_feedback": feedback}

    return MultiTurnAgentExecutor(Instance)
