"""The user's agents, from the flags."""

from __future__ import annotations

import asyncio
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.agents.pool import AgentPool
from openrlhf.launch import settings


def make_agents(
    config: settings.Sampling,
    tokenizer: PreTrainedTokenizerBase,
    *,
    needs_reward: bool = True,
    log_dir: Path | None = None,
) -> AgentEpisodes | None:
    """The user's agents, where there are some; their processes start with their first episodes."""
    made_of = settings.agent_settings(config)
    if made_of is None:
        return None
    pool = AgentPool(made_of, tokenizer, log_dir=log_dir)
    return AgentEpisodes(pool, tokenizer, needs_reward=needs_reward)


def check_agents(config: settings.Sampling, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the agent's file, before any device is touched. Raises ConfigError."""

    async def check(agents: AgentEpisodes) -> None:
        try:
            await agents.check()
        finally:
            await agents.close()

    if agents := make_agents(config, tokenizer):
        asyncio.run(check(agents))
