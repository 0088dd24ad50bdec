"""Creates the user's agents, and tries them at startup."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.checks import Finding
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.continuation import encode_as_sample
from openrlhf.rollout.generator import SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams

TRIAL_SECONDS = 30.0  # a trial episode that takes longer ends without a finding

AgentCommand = PPOConfig | EvaluationConfig


def make_agents(
    config: AgentCommand, tokenizer: PreTrainedTokenizerBase, *, log_dir: Path | None = None
) -> AgentEpisodes | None:
    """Return the agents defined by --train.agent_func_path, or None if the flag is not set.

    The agents' processes start with the first episode and write their logs to `log_dir`.
    """
    file = config.train.agent_func_path
    if not file:
        return None
    return AgentEpisodes(
        file,
        tokenizer,
        config.rollout,
        config.reward,
        max_length=config.data.max_len,
        needs_reward=not _is_scored_later(config),
        log_dir=log_dir,
    )


def _is_scored_later(config: AgentCommand) -> bool:
    """Return whether episodes without a reward are scored by models or need no reward."""
    if config.reward.models:
        return True
    if isinstance(config, EvaluationConfig):
        return bool(config.judge.url)
    return bool(config.algo.distill.teacher)


def check_agents(
    config: AgentCommand, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, spec: SamplingSpec
) -> list[Finding]:
    """Load the file given by --train.agent_func_path, and run an episode for one prompt.

    There are no engines yet. In every turn, the agent gets the prompt's label as the answer, or an
    empty answer if the label is not a text. Returns a notice if the episode fails. Raises
    ConfigError if the file cannot be loaded.
    """
    agents = make_agents(config, tokenizer)
    if not agents:
        return []
    with closing(agents):
        return asyncio.run(_check(agents, prompt, spec, tokenizer))


async def _check(
    agents: AgentEpisodes,
    prompt: Prompt,
    spec: SamplingSpec,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Finding]:
    await agents.check()
    one_sample = replace(spec, rollout=replace(spec.rollout, n_samples_per_prompt=1))

    async def give_label(
        _: Prompt, __: SamplingSpec, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        return [given_answer(tokenizer, tokens, prompt.label, params[0])]

    try:
        episodes = agents.play(prompt, one_sample, give_label)
        [episode] = await asyncio.wait_for(episodes, TRIAL_SECONDS)
    except TimeoutError:
        return []
    if not episode.failed:
        return []
    seen = (
        f"The agent failed in a trial episode: {episode.error}\nIn the trial, the agent got the "
        f"label {str(prompt.label)[:80]!r} of one prompt instead of the policy's answers."
    )
    fix = "If the policy's answers cause the same error, all episodes fail: correct the agent."
    return [Finding(seen, fix)]


def given_answer(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], label: object, params: SamplingParams
) -> Generation:
    """Return the text `label` as if it had been sampled after `tokens`, with the eos token."""
    text = ""
    if isinstance(label, str):
        text = label
    answer = encode_as_sample(tokenizer, tokens, text)
    limit = params.max_tokens or len(answer)
    return Generation(
        tokens=answer[:limit],
        logprobs=[0.0] * len(answer[:limit]),
        finish_reason="stop" if len(answer) <= limit else "length",
        weight_versions=(0,),
    )
