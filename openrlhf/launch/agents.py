"""The user's agents, made from the flags."""

import asyncio
from contextlib import closing
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.launch import settings


def make_agents(
    config: settings.Sampling, tokenizer: PreTrainedTokenizerBase, **more: Any
) -> AgentEpisodes | None:
    """The agents of --train.agent_func_path, or None. Their processes start with their first
    episodes.

    `more`: the optional arguments of `AgentEpisodes`.
    """
    if not (file := config.train.agent_func_path):
        return None
    return AgentEpisodes(
        file, tokenizer, config.rollout, config.reward, max_length=config.data.max_len, **more
    )


def check_agents(config: settings.Sampling, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the agent's file before a model is loaded. Raises ConfigError."""
    if agents := make_agents(config, tokenizer):
        with closing(agents):
            asyncio.run(agents.check())
