"""Root of `eval`: what is evaluated, on which prompts or pairs, and who judges."""

from __future__ import annotations

from typing import Any, ClassVar

from openrlhf.config import rules, shared
from openrlhf.config.commands import RecordedCommand
from openrlhf.config.effects import EFFECTS, Effects, Sentences
from openrlhf.config.flags import Section, option, required
from openrlhf.config.inference import EngineCommand
from openrlhf.config.learning import RLEvalConfig
from openrlhf.config.rollout import PromptColumns, RewardConfig, RolloutConfig
from openrlhf.config.supervised import PairColumns, RMDeepSpeedConfig


# fmt: off
class AgainstConfig(Section):
    """What the model's answers are compared with."""
    model_name_or_path: str | None = option(None, "Folder or hub name of the other model.", holds="model")
    answer_key: str | None = option(None, "Column with the other answers, instead of a model.")

class JudgeConfig(Section):
    """A language model that compares answers."""
    url: str | None = option(None, "OpenAI-compatible server, as http://host:8000/v1; OPENAI_API_KEY is its key.")
    model: str | None = option(None, "Name of the model there.")
    max_tokens: int = option(512, "Tokens of a judgement.", ge=1)

class EvaluationSetConfig(RLEvalConfig):
    """Prompts or pairs, and how answers are sampled."""
    dataset: str = required("Files, folders or hub names, by comma.", holds="dataset")

class EvaluatedDataConfig(PairColumns, PromptColumns, shared.DataConfig):
    """Tokenizer and columns."""

class EvaluationConfig(EngineCommand, RecordedCommand):
    """Evaluation of a checkpoint by itself."""
    effects: ClassVar[Effects] = EFFECTS["evaluation"]

    task: str = option(
        "pass_k", "pass@k per data source; how often reward models prefer the chosen answer of a pair; or how often "
        "the model's answers win against others.", choices=("pass_k", "rm_accuracy", "win_rate"))
    eval: EvaluationSetConfig = EvaluationSetConfig()
    data: EvaluatedDataConfig = EvaluatedDataConfig()
    reward: RewardConfig = RewardConfig()
    against: AgainstConfig = AgainstConfig()
    judge: JudgeConfig = JudgeConfig()
    rollout: RolloutConfig = RolloutConfig(micro_batch_size=8)
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()

    @property
    def samples_answers(self) -> bool:
        """Whether engines are needed."""
        return self.task != "rm_accuracy"

    def derived_values(self) -> dict[str, Any]:
        """What follows from the flags, by path."""
        shared = self.eval.n_samples_per_prompt > 1 or self.train.agent_func_path is not None
        return rules.machine_values(self) | self.engine_values(shared=shared)

    def notices(self) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        return [*rules.single_process_notices(self), *super().notices()]

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        if self.samples_answers:
            compared = self._win_rate() if self.task == "win_rate" else []
            return [*super().mistakes(), *self._sampling(), *compared]
        return [
            *super().mistakes(),
            (not self.reward.scalars, "<task> judges reward models: give --reward.model_name_or_path."),
            *rules.sum_mistakes(self.reward, len(self.reward.models)),
        ]

    def _win_rate(self) -> Sentences:
        against, judge = self.against, self.judge
        rewarded = rules.has_rule(self) or self.reward.models
        return [
            (bool(against.model_name_or_path) == bool(against.answer_key),
             "<task> compares with the answers of one other: give --against.model_name_or_path, or the column of those "
             "in the dataset with --against.answer_key."),
            (bool(rewarded) == bool(judge.url),
             "<task> has one way to tell which answer is better: give --judge.url, or one or more of --reward.remote_url, "
             "--reward.verifier and --reward.model_name_or_path."),
            (self.train.agent_func_path and against.answer_key,
             "<against.answer_key> has no agent that could reward it: compare with --against.model_name_or_path, or leave "
             "out --train.agent_func_path."),
            (judge.url and not judge.url.startswith(("http://", "https://")), "<judge.url> is no http(s) URL."),
            (judge.url and not judge.model, "<judge.url> may have several models: name one with --judge.model."),
            (judge.url and rules.is_number(self.reward.on_error),
             "<reward.on_error> is no verdict of <judge.url>: use fail or drop."),
        ]

    def _sampling(self) -> Sentences:
        return [
            *self.engine_mistakes(),
            *rules.reward_mistakes(self, needed=self.task == "pass_k"),
            *rules.remote_engine_mistakes(self.rollout),
            (self.train.agent_func_path and (self.reward.remote_url or self.reward.verifier),
             "The agent of <train.agent_func_path> rewards: leave out --reward.remote_url and --reward.verifier."),
        ]
