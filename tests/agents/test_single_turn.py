"""The single-turn executor, with a reward from a file or from servers, or without a reward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.answers import CompletionOutput, RequestOutput
from openrlhf.agents.contract import ContractMistake, SingleTurnAgentExecutor
from openrlhf.core.trajectory import Failure
from openrlhf.rollout.sampling import SamplingParams
from tests.reward_server import reward_server
from tests.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
FUNCTION = """
def reward_func(queries, prompts, labels):
    return {'rewards': [len(queries[0])], 'scores': [labels[0]]}
"""


class Engine:
    """An engine that responds to every prompt with `4`."""

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any = None, multi_modal_data: Any = None
    ) -> Any:
        tokens = TOKENIZER("4")["input_ids"]
        output = CompletionOutput(
            index=0,
            text="4",
            token_ids=tokens,
            logprobs=None,
            finish_reason="stop",
            stop_reason=None,
        )
        return RequestOutput(prompt_token_ids=prompt_token_ids, outputs=[output])


def played(reward: str | list[str] | None) -> dict[str, Any]:
    executor = SingleTurnAgentExecutor(reward)
    return asyncio.run(executor.execute("2+2=", 0.5, SamplingParams(), 64, TOKENIZER, Engine()))


def test_episode_without_remote_rm_url_has_no_reward_yet() -> None:
    episode = played(None)
    assert "reward" not in episode
    assert TOKENIZER.decode(episode["observation_tokens"]) == "2+2=4"
    assert episode["action_ranges"] == [(4, 5)]


def test_reward_func_receives_prompt_and_response(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    episode = played(str(file))
    assert (episode["reward"], episode["scores"], episode["extra_logs"]) == (5.0, 0.5, {})


@pytest.mark.parametrize(
    "parameters",
    ["prompts, queries, labels", "queries, prompts", "queries, *, labels, **rest", "a, b, c"],
)
def test_reward_func_receives_arguments_by_position_or_name(
    parameters: str, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    query = parameters.split(", ")[0] if parameters.startswith("a") else "queries"
    file.write_text(f"def reward_func({parameters}):\n    return [len({query}[0])]\n")
    assert played(str(file))["reward"] == 5.0


def test_server_reward_is_used_and_a_server_failure_fails_the_episode() -> None:
    with reward_server() as server:
        assert played(f"{server.url}/scores, {server.url}/scores")["scores"] == 0.25
        with pytest.raises(ContractMistake, match="rewards") as caught:
            played([f"{server.url}/not_finite"])
    assert caught.value.failure is Failure.RESULT


def test_empty_remote_rm_url_is_rejected() -> None:
    with pytest.raises(TypeError, match="remote_rm_url"):
        SingleTurnAgentExecutor("")
