"""The executor of one sample, with a reward of its own: a file, servers, or none."""

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
FUNCTION = "def reward_func(queries, prompts, labels):\n    return {'rewards': [len(queries[0])], 'scores': [labels[0]]}\n"


class Engine:
    """Answers `4` to everything."""

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


def test_without_a_reward_of_its_own_a_reward_model_scores_the_episode() -> None:
    episode = played(None)
    assert "reward" not in episode
    assert (TOKENIZER.decode(episode["observation_tokens"]), episode["action_ranges"]) == (
        "2+2=4",
        [(4, 5)],
    )


def test_a_file_is_called_with_prompt_and_response(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    episode = played(str(file))
    assert (episode["reward"], episode["scores"], episode["extra_logs"]) == (5.0, 0.5, {})


@pytest.mark.parametrize(
    "parameters",
    ["prompts, queries, labels", "queries, prompts", "queries, *, labels, **rest", "a, b, c"],
)
def test_a_function_gets_its_arguments_as_the_reward_flag_gives_them(
    parameters: str, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    query = parameters.split(", ")[0] if parameters.startswith("a") else "queries"
    file.write_text(f"def reward_func({parameters}):\n    return [len({query}[0])]\n")
    assert played(str(file))["reward"] == 5.0


def test_servers_are_asked_and_their_errors_are_the_episodes() -> None:
    with reward_server() as server:
        assert played(f"{server.url}/scores, {server.url}/scores")["scores"] == 0.25
        with pytest.raises(ContractMistake, match="returned rewards that are not finite") as caught:
            played([f"{server.url}/not_finite"])
    assert caught.value.failure is Failure.RESULT


def test_an_empty_reward_is_refused() -> None:
    with pytest.raises(TypeError, match="remote_rm_url is empty"):
        SingleTurnAgentExecutor("")
