"""The user's agents, made from the flags."""

import asyncio
from contextlib import closing
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.launch import settings


def make_agents(
    config: settings.Sampling,
    tokenizer: PreTrainedTokenizerBase,
    *,
    needs_reward: bool = True,
    log_dir: Path | None = None,
) -> AgentEpisodes | None:
    """The agents of --train.agent_func_path, or None. Their processes start with their first episodes."""
    if not config.train.agent_func_path:
        return None
    return AgentEpisodes(
        config.train.agent_func_path,
        tokenizer,
        config.rollout,
        config.reward,
        max_length=config.data.max_len,
        needs_reward=needs_reward,
        log_dir=log_dir,
    )


def check_agents(config: settings.Sampling, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the agent's file before a model is loaded. Raises ConfigError."""
    if agents := make_agents(config, tokenizer):
        with closing(agents):
            asyncio.run(agents.check())
