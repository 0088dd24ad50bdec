"""Root of `eval`: what is evaluated, on which prompts or pairs, and who judges."""

from __future__ import annotations

from typing import Any, ClassVar

from openrlhf.config import rules, shared
from openrlhf.config.commands import RecordedCommand
from openrlhf.config.effects import EFFECTS, Effects, Sentences, combined
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

class EvaluatedDataConfig(PairColumns, PromptColumns, shared.EndedTextConfig, shared.DataConfig):
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
        own = self.unless_given({"data.max_len": rules.room(self)})
        return own | rules.machine_values(self) | self.engine_values(shared=shared)

    def notices(self) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        return [*rules.single_process_notices(self), *super().notices()]

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        judge, own = self.judge, [*super().mistakes(), *combined(self, "refused", "evaluation")]
        if not self.samples_answers:
            return [*own, *rules.sum_mistakes(self.reward, len(self.reward.models))]
        return [
            *own,
            *self.engine_mistakes(),
            *rules.reward_mistakes(self),
            *rules.remote_engine_mistakes(self.rollout),
            (judge.url and not judge.url.startswith(("http://", "https://")), "<judge.url> is no http(s) URL."),
        ]
