"""Root of `reward_test`: a reward, and the rows it is tried on."""

from __future__ import annotations

import os
from typing import Self

from openrlhf.config import rules
from openrlhf.config.flags import Section, amend, bound_violations, option, spelled_out
from openrlhf.config.rollout import PromptConfig, RemoteEnginesConfig, RuleConfig
from openrlhf.config.rules import Given, Sentences
from openrlhf.config.unsupported import refusals


# fmt: off
class ScoredDataConfig(PromptConfig, title="The rows to score."):
    output_key: str | None = option(None, "Column with the response; unset: the label is scored, as a right answer.")
    max_samples: int = option(1000, "Rows to score, the first ones.", ge=1)
    input_template: str | None = option(None, "Text with {} as prompt.")

class RewardTestConfig(Section, title="Try a reward on a dataset, before any training."):
    reward: RuleConfig = RuleConfig()
    rollout: RemoteEnginesConfig = RemoteEnginesConfig()
    data: ScoredDataConfig = ScoredDataConfig()
    plugin: tuple[str, ...] = option((), "Your file with registrations.", metavar="FILE.py")

    def resolve(self, explicit: Given = frozenset(), *, command: str = "") -> tuple[Self, list[str]]:
        """A copy with the number of workers, and no notices."""
        return amend(self, {"reward.workers": self.reward.workers or os.cpu_count() or 1}), []

    def check(self) -> list[str]:
        """All that is wrong, one sentence each."""
        return [*bound_violations(self), *refusals(self), *spelled_out(self, self._mistakes())]

    def _mistakes(self) -> Sentences:
        data = self.data
        return [
            (not self.reward.remote_url and not self.reward.verifier,
             "There is no reward to try: give --reward.remote_url (a .py file or a URL) or --reward.verifier."),
            (not data.output_key and not data.label_key,
             "There is nothing to score: name the column of the responses with --data.output_key, or that of right "
             "answers with --data.label_key."),
            *rules.rule_mistakes(self.reward, data.label_key),
            *rules.remote_engine_mistakes(self.rollout),
            *rules.sources_exist(self),
        ]
