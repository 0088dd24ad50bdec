"""Creates the user's agents, and checks them at startup."""

import asyncio
from contextlib import closing
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.launch import settings


def make_agents(
    config: settings.SamplingCommand, tokenizer: PreTrainedTokenizerBase, **more: Any
) -> AgentEpisodes | None:
    """Return the agents defined by --train.agent_func_path, or None if the flag is not set.

    `more` is passed to `AgentEpisodes`. The agents' processes start with the first episode.
    """
    file = config.train.agent_func_path
    if not file:
        return None
    return AgentEpisodes(
        file, tokenizer, config.rollout, config.reward, max_length=config.data.max_len, **more
    )


def check_agents(config: settings.SamplingCommand, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the file given by --train.agent_func_path. Raises ConfigError."""
    agents = make_agents(config, tokenizer)
    if agents:
        with closing(agents):
            asyncio.run(agents.check())
