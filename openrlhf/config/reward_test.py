"""Configuration of `reward_test`: a reward and the rows to test it on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openrlhf.config import rules, sampling_rules
from openrlhf.config.commands import Command
from openrlhf.config.flags import Section, Unused, count, unset
from openrlhf.config.rollout import (
    FUNCTION,
    PromptConfig,
    RemoteEnginesConfig,
    RuleConfig,
    unused_by_rewards,
    unused_without,
)


class ScoredDataConfig(PromptConfig):
    """The rows to score."""

    output_key: str | None = unset(
        "Column with the response; unset: score the label as if it were a correct response."
    )
    max_samples: int = count(1000, "Number of rows to score, starting with the first.")
    input_template: str | None = unset("Template with {} for the prompt.")


class ScoredPolicyConfig(Section):
    """The model that a run would train."""

    model_name_or_path: str | None = unset(
        "Encode and decode responses with this model's tokenizer and append its eos token, as in "
        "a run; unset: score responses unchanged.",
        holds="model",
    )


class RewardTestConfig(Command):
    """Test a reward on a dataset before training."""

    actor: ScoredPolicyConfig = ScoredPolicyConfig()
    reward: RuleConfig = RuleConfig()
    rollout: RemoteEnginesConfig = RemoteEnginesConfig()
    data: ScoredDataConfig = ScoredDataConfig()

    def derived_values(self) -> dict[str, Any]:
        """Return the number of processes for reward code."""
        return rules.machine_values(self)

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        reward = self.reward
        data = self.data
        if not reward.remote_url and not reward.verifier:
            yield (
                "There is no reward to test: set --reward.remote_url (a .py file or a URL) or "
                "--reward.verifier."
            )
        yield from sampling_rules.label_violations(reward, data.label_key)
        if not data.output_key and not data.label_key:
            yield (
                "There is nothing to score: set the response column with --data.output_key, or "
                "the label column with --data.label_key."
            )
        yield from sampling_rules.source_violations(reward)
        yield from sampling_rules.remote_engine_violations(self.rollout)
        yield from rules.probability_violations(self, "data.prompt_dataset", "data.prompt_probs")

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        yield from unused_by_rewards(self.reward, self.rollout, agents={}, judges={})
        yield from unused_without({FUNCTION: self.reward.function_path}, "rollout.remote_engines")
