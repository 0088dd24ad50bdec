"""Configuration of `eval`: the model, the prompts or pairs, and the judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openrlhf.config import rules, sampling_rules, shared
from openrlhf.config.commands import RecordedCommand
from openrlhf.config.flags import Section, Unused, count, option, required, unset
from openrlhf.config.inference import SCORING_FLAGS, TRAINING_FLAGS, EngineCommand
from openrlhf.config.learning import RLEvalConfig
from openrlhf.config.rollout import (
    AGENT,
    FUNCTION,
    PromptColumns,
    RewardConfig,
    RolloutConfig,
    unused_by_agents,
    unused_by_rewards,
    unused_without,
)
from openrlhf.config.supervised import PairColumns, RMDeepSpeedConfig

# Flags for sampling the model's answers.
SAMPLING_FLAGS = (
    "model.model_name_or_path",
    "vllm",
    "rollout.batch_size",
    "rollout.max_new_tokens",
    "rollout.stop",
    "rollout.stop_token_ids",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.remote_engines",
    "reward.remote_url",
    "reward.verifier",
    "train.agent_func_path",
    "data.input_key",
    "data.label_key",
    "eval.temperature",
    "eval.n_samples_per_prompt",
)


class AgainstConfig(Section):
    """Answers to compare with the model's answers."""

    model_name_or_path: str | None = unset("Folder or Hub name of the other model.", holds="model")
    answer_key: str | None = unset(
        "Dataset column with the other answers, used instead of a model."
    )


class JudgeConfig(Section):
    """A language model that compares answers."""

    url: str | None = unset(
        "OpenAI-compatible server, e.g. http://host:8000/v1. Its API key is read from "
        "OPENAI_API_KEY.",
    )
    model: str | None = unset("Name of the model on that server.")
    max_tokens: int = count(512, "Maximum tokens per judgment.")


class EvaluationSetConfig(RLEvalConfig):
    """Prompts or pairs, and how answers are sampled."""

    dataset: str = required("Comma-separated files, folders or Hub names.", holds="dataset")


class EvaluatedDataConfig(PairColumns, PromptColumns, shared.EndedTextConfig, shared.DataConfig):
    """Tokenizer and columns."""


class EvaluationConfig(EngineCommand, RecordedCommand):
    """Standalone evaluation of a checkpoint."""

    task: str = option(
        "pass_k",
        "pass_k: pass@k per data source. rm_accuracy: how often reward models prefer the chosen "
        "answer of a pair. win_rate: how often the model's answers beat other answers.",
        choices=("pass_k", "rm_accuracy", "win_rate"),
    )
    eval: EvaluationSetConfig = EvaluationSetConfig()
    data: EvaluatedDataConfig = EvaluatedDataConfig()
    reward: RewardConfig = RewardConfig()
    against: AgainstConfig = AgainstConfig()
    judge: JudgeConfig = JudgeConfig()
    rollout: RolloutConfig = RolloutConfig(micro_batch_size=8)
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()

    @property
    def samples_answers(self) -> bool:
        """True if engines are needed."""
        return self.task != "rm_accuracy"

    def derived_values(self) -> dict[str, Any]:
        """Return the values derived from the flags, keyed by flag path."""
        shared = self.eval.n_samples_per_prompt > 1 or self.train.agent_func_path is not None
        own = self.unless_given({"data.max_len": rules.room(self)})
        return own | rules.machine_values(self) | self.engine_values(shared=shared)

    def notices(self) -> Iterator[str]:
        """Yield notices about this resolved configuration."""
        yield from rules.single_process_notices(self)
        yield from super().notices()

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        reward = self.reward
        agent = self.train.agent_func_path
        if self.task == "rm_accuracy":
            if not reward.scalars:
                yield "<task> evaluates reward models: set --reward.model_name_or_path."
            yield from sampling_rules.sum_violations(reward, len(reward.models))
            return
        if self.task == "win_rate":
            yield from self._win_rate_violations()
        elif not sampling_rules.is_rewarded(reward, agent):
            yield sampling_rules.NOTHING_REWARDS
        yield from self.engine_violations()
        yield from sampling_rules.reward_violations(reward, agent)
        if self.data.layout == "columns":
            yield from sampling_rules.label_violations(reward, self.data.label_key)
        yield from sampling_rules.remote_engine_violations(self.rollout)
        if self.judge.url and not rules.has_host(self.judge.url):
            yield "<judge.url> is not an http(s) URL."

    def _win_rate_violations(self) -> Iterator[str]:
        """Yield violations of the rules for the other answers and for the choice of the winner."""
        against = self.against
        judge = self.judge
        reward = self.reward
        agent = self.train.agent_func_path
        if bool(against.model_name_or_path) == bool(against.answer_key):
            yield (
                "<task> compares the answers with those of one other source: set either "
                "--against.model_name_or_path, or a dataset column with --against.answer_key."
            )
        if bool(judge.url) == sampling_rules.is_rewarded(reward, agent):
            yield (
                "<task> needs one way to decide which answer is better: set either --judge.url, or "
                "one or more rewards with --reward.*."
            )
        if agent and against.answer_key:
            yield (
                "<against.answer_key> is a column of answers that the agent cannot reward: compare "
                "with --against.model_name_or_path, or leave out --train.agent_func_path."
            )
        if judge.url and reward.on_error not in ("fail", "drop"):
            yield (
                "<reward.on_error> sets a reward, but <judge.url> gives verdicts: use fail or drop."
            )
        if judge.url and not judge.model:
            yield "<judge.url> may serve several models: choose one with --judge.model."

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        training = [
            "eval.steps",
            "eval.patience",
            "eval.at_start",
            "rollout.temperature",
            "reward.clip_range",
            "reward.overlong_buffer_len",
            "reward.overlong_penalty_factor",
            "reward.stop_properly_penalty_coef",
        ]
        yield Unused([*TRAINING_FLAGS, *training], "with this command")
        if self.task == "rm_accuracy":
            yield Unused(SAMPLING_FLAGS, "with --task rm_accuracy")
        else:
            pairs = [
                "data.prompt_key",
                "data.chosen_key",
                "data.rejected_key",
                "data.space_before_eos",
            ]
            yield Unused(pairs, "without --task rm_accuracy")
        if self.task != "win_rate":
            yield Unused(["against", "judge"], "without --task win_rate")
        if not self.reward.models:
            scoring = [*SCORING_FLAGS, "reward.normalize_enable"]
            yield Unused(scoring, "without --reward.model_name_or_path")
        agent = {AGENT: self.train.agent_func_path}
        judges = {"--judge.url": self.judge.url}
        yield from unused_by_agents(self.train.agent_func_path)
        yield from unused_by_rewards(self.reward, self.rollout, agents=agent, judges=judges)
        askers = {**agent, FUNCTION: self.reward.function_path}
        yield from unused_without(askers, "rollout.remote_engines")
