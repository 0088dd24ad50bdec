"""Root of `reward_test`: a reward, and the rows it is tried on."""

from __future__ import annotations

from typing import Any

from openrlhf.config import rules
from openrlhf.config.commands import Command
from openrlhf.config.effects import Sentences, combined
from openrlhf.config.flags import Section, option
from openrlhf.config.rollout import PromptConfig, RemoteEnginesConfig, RuleConfig


# fmt: off
class ScoredDataConfig(PromptConfig):
    """The rows to score."""
    output_key: str | None = option(None, "Column with the response; unset: the label is scored, as a right answer.")
    max_samples: int = option(1000, "Rows to score, the first ones.", ge=1)
    input_template: str | None = option(None, "Text with {} as prompt.")

class ScoredPolicyConfig(Section):
    """The model that a run would train."""
    model_name_or_path: str | None = option(
        None, "Its tokenizer encodes and decodes responses as in a run, and ends them with the end token; unset: responses are "
        "scored as they stand.", holds="model")

class RewardTestConfig(Command):
    """Try a reward on a dataset, before any training."""
    actor: ScoredPolicyConfig = ScoredPolicyConfig()
    reward: RuleConfig = RuleConfig()
    rollout: RemoteEnginesConfig = RemoteEnginesConfig()
    data: ScoredDataConfig = ScoredDataConfig()

    def derived_values(self) -> dict[str, Any]:
        """The number of user processes."""
        return rules.machine_values(self)

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        return [
            *super().mistakes(),
            *combined(self, "refused", "reward_test"),
            *rules.rule_mistakes(self),
            *rules.remote_engine_mistakes(self.rollout),
            *rules.probabilities_fit(self, "data.prompt_dataset", "data.prompt_probs"),
        ]
