"""`openrlhf eval`, which measures pass@k, reward-model accuracy or a win rate."""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.checks import collect, loaded, report
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.core.trajectory import Trajectory
from openrlhf.data.continuation import encode_as_sample
from openrlhf.data.errors import check_columns, text_of
from openrlhf.data.feedback import PreferenceDataset
from openrlhf.data.first_look import TextFormat, texts_of
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import Table, key_columns, load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.shown import show_text
from openrlhf.data.trained_format import with_trained_format
from openrlhf.evaluation import comparing
from openrlhf.evaluation.comparing import Columns, Comparison, given_text
from openrlhf.evaluation.processes import Progress, engines, recorded_run, reward_models
from openrlhf.launch import settings
from openrlhf.launch.agents import check_agents, make_agents
from openrlhf.launch.prompt_data import (
    check_reward_formats,
    check_reward_models,
    policy_tokenizer,
    prompt_findings,
    read_prompts,
    scorer_tokenizer,
)
from openrlhf.launch.reinforcement import show_prompts
from openrlhf.observability.metrics import Metric
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import sample_row
from openrlhf.observability.tables import print_sources
from openrlhf.reporting import say
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rewards.judge import Judge
from openrlhf.rewards.preview import check_reward
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.rule import reward_of
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.episode_metrics import evaluation_metrics, group_by_source, source_columns
from openrlhf.rollout.generator import Engines, RolloutGenerator, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trainers.sources import evaluate

T = TypeVar("T")


def run_evaluation(config: EvaluationConfig) -> None:
    """Run the task selected by --task, on a running or new Ray cluster.

    Raises RewardErrors if too many answers or pairs failed.
    """
    report(*check_engine_args(config.vllm.engine_args))
    if config.samples_answers:
        offer_engines(config.rollout, config.reward)

        def read_model() -> None:
            read_candidate(config, "model")

        report(*loaded(partial(check_reward, config.reward), read_model))
    tasks = {"pass_k": run_pass_k, "rm_accuracy": run_rm_accuracy, "win_rate": run_win_rate}
    run_task = tasks[config.task]
    run_task(config)


def run_pass_k(config: EvaluationConfig) -> None:
    """Sample and score answers to every prompt, and report pass@1 and pass@k per data source."""
    model = read_candidate(config, "model")
    k = config.eval.n_samples_per_prompt
    if config.dry_run:
        show_prompts(config, model.prompts)
        return
    with recorded_run(config) as recorder:
        evaluation = Evaluation(config, recorder)
        answers = evaluation.rewarded(evaluation.answers(model, "vllm"))
        recorder.folder.log_samples(sample_row(0, answer, evaluation=True) for answer in answers)
        rows = rows_of(answers, lambda answer: answer, partial(source_columns, k=k))
        evaluation.report(evaluation_metrics(answers, k=k), rows)
        evaluation.errors.check(answers)


def run_rm_accuracy(config: EvaluationConfig) -> None:
    """Score both texts of every pair, and report how often the chosen text wins."""
    tokenizer = scorer_tokenizer(config)
    rows = read_rows(config)
    data = recognise(rows, config, "pairs")
    model = f"--reward.model_name_or_path {config.reward.models[0]}"
    data = with_trained_format(config, data, tokenizer, rows, column=data.prompt_key, model=model)
    dataset = PreferenceDataset(rows, tokenizer, data)
    texts = texts_of(rows, key_columns(data))
    report(*check_reward_formats(config, TextFormat.of(data, tokenizer), texts))
    if config.dry_run:
        say(dataset.summary)
        say(show_text("chosen", dataset[0].chosen, tokenizer))
        say(show_text("rejected", dataset[0].rejected, tokenizer))
        return
    with recorded_run(config) as recorder:
        evaluation = Evaluation(config, recorder)
        recorder.display.note(dataset.summary)
        chosen: list[Trajectory] = []
        rejected: list[Trajectory] = []
        for number in range(len(dataset)):
            pair = dataset[number]
            chosen.append(given_text(tokenizer, number, pair.datasource, pair.chosen))
            rejected.append(given_text(tokenizer, number, pair.datasource, pair.rejected))
        pairs = evaluation.compared(chosen, rejected)
        evaluation.report_pairs(pairs, comparing.accuracy_columns, comparing.reward_metrics(pairs))


def run_win_rate(config: EvaluationConfig) -> None:
    """Report how often the model's answers beat those of another model or a dataset column."""
    model = read_candidate(config, "model")
    other = model
    written: list[list[int]] | None = None
    if config.against.answer_key:
        written = read_answers(config, model, config.against.answer_key)
    else:
        other = read_candidate(config, "against")
    judge = None
    if config.judge.url:
        judge = Judge(config.judge, config.reward)
        asyncio.run(judge.engine.servers.check())
    if config.dry_run:
        show_prompts(config, model.prompts)
        return
    with recorded_run(config) as recorder:
        evaluation = Evaluation(config, recorder)
        ours = evaluation.answers(model, "vllm")
        if written is None:
            theirs = evaluation.answers(other, "against")
        else:
            theirs = evaluation.written(model, written)
        if judge:
            pairs = comparing.pair_up(ours, theirs)
            tokenizers = (model.tokenizer, other.tokenizer)
            pairs = asyncio.run(comparing.judged(judge, pairs, tokenizers))
        else:
            pairs = evaluation.compared(ours, theirs)
        evaluation.report_pairs(pairs, comparing.win_columns)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to evaluate, with the prompts rendered for it."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset


def read_candidate(config: EvaluationConfig, section: Literal["model", "against"]) -> Candidate:
    """Load a model's tokenizer and prompts, and check models and prompts.

    The checks cover the model, the agents, the reward models that read the model's tokens, and the
    prompts. Raises ModelError or DataError.
    """
    path = config.model.model_name_or_path
    if section == "against":
        path = config.against.model_name_or_path
    assert path is not None  # guaranteed by the configuration's rules
    flag = f"--{section}.model_name_or_path"
    model = f"{flag} {path}"
    tokenizer = policy_tokenizer(config, path, flag=flag)
    prompts = read_prompts(
        config,
        PromptDataset,
        tokenizer,
        config.eval.dataset,
        model=model,
        split=config.eval.split,
        max_samples=config.data.max_samples,
    )
    checks = collect(
        partial(check_reward_models, config, tokenizer, policy=model),
        partial(prompt_findings, config, prompts, tokenizer, model=model),
        partial(check_agents, config, tokenizer, prompts[0], settings.eval_sampling(config)),
    )
    report(*checks)
    return Candidate(path=path, tokenizer=tokenizer, prompts=prompts)


def read_rows(config: EvaluationConfig) -> Table:
    """Load the rows of --eval.dataset."""
    return load_datasets(
        config.eval.dataset,
        split=config.eval.split,
        max_samples=config.data.max_samples,
        seed=config.train.seed,
    )


def read_answers(config: EvaluationConfig, model: Candidate, column: str) -> list[list[int]]:
    """Tokenize the answers in a column as if the model had sampled them. Raises DataError."""
    rows = read_rows(config)
    check_columns(rows, {"--against.answer_key": column})
    tokenizer = model.tokenizer
    answers: list[list[int]] = []
    for number, row in enumerate(rows):
        text = text_of(cast(Mapping[str, object], row), column)
        answers.append(encode_as_sample(tokenizer, model.prompts[number].tokens, text))
    return answers


@dataclass(eq=False, repr=False)
class Evaluation:
    """An evaluation on a Ray cluster, with its run folder.

    Engines and reward models are started when needed, one after the other.
    """

    config: EvaluationConfig
    recorder: Recorder

    def __post_init__(self) -> None:
        self.logs = self.recorder.folder.logs
        self.errors = ErrorBudget(self.config.reward)

    def answers(self, model: Candidate, name: str) -> list[Trajectory]:
        """Sample answers to every prompt with engines named `name`, which are stopped afterwards.

        A reward function, server or verifier also scores the answers.
        """
        config = self.config
        spec = settings.eval_sampling(config)
        self.recorder.display.note(
            f"{len(model.prompts)} prompts; sampling {spec.n_samples} answer(s) per prompt with "
            f"{model.path}."
        )
        with engines(
            config, model.path, model.tokenizer, name=name, recorder=self.recorder
        ) as fleet:
            agents = make_agents(config, model.tokenizer, log_dir=self.logs)
            return self._sample(model, fleet, spec, agents)

    def written(self, model: Candidate, answers: Sequence[list[int]]) -> list[Trajectory]:
        """Score given answers, one per prompt, in the same way as sampled answers."""
        spec = settings.eval_sampling(self.config)
        one_each = replace(spec, rollout=replace(spec.rollout, n_samples_per_prompt=1))
        return self._sample(model, WrittenAnswers(answers), one_each)

    def _sample(
        self,
        model: Candidate,
        engines: Engines,
        spec: SamplingSpec,
        agents: AgentEpisodes | None = None,
    ) -> list[Trajectory]:
        config = self.config
        closing_agents: AbstractContextManager[object] = nullcontext()
        if agents:
            closing_agents = closing(agents)
        with (
            closing(BackgroundLoop()) as loop,
            reward_of(config.reward, log_dir=self.logs) as rule,
            closing_agents,
        ):
            generator = RolloutGenerator(
                engines, model.tokenizer, rule, agents=agents, fallback=config.reward.fallback
            )
            progress = Progress(self.recorder.display)
            answered = count(1)

            def show_progress(_: Sequence[Trajectory]) -> None:
                progress.show(f"{next(answered)} of {len(model.prompts)} prompts answered")

            return evaluate(
                model.prompts,
                generator,
                loop,
                spec,
                step=0,
                timeout_s=config.train.step_timeout,
                finished=show_progress,
            )

    def rewarded(self, answers: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the answers with the weighted sum of their rewards.

        Reward models, if there are any, are started for this call and stopped afterwards.
        """
        with reward_models(self.config, logs=self.logs) as models:
            return models.score(answers)

    def compared(
        self, ours: Sequence[Trajectory], theirs: Sequence[Trajectory]
    ) -> list[Comparison]:
        """Pair the answers. In each pair, the answer with the larger reward wins."""
        scored = self.rewarded([*ours, *theirs])
        pairs = comparing.pair_up(scored[: len(ours)], scored[len(ours) :])
        return [replace(pair, win=comparing.by_reward(pair)) for pair in pairs]

    def report(self, metrics: Mapping[str, float], rows: Mapping[str, Mapping[str, float]]) -> None:
        """Log the metrics, and print them by data source."""
        if self.recorder.display.json:
            self.recorder.evaluation(0, metrics)
        else:
            self.recorder.log(0, metrics)
            print_sources(rows, console=self.recorder.display.console)

    def report_pairs(
        self,
        pairs: Sequence[Comparison],
        columns: Columns,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """Write the pairs to the run folder, and report their `columns` and `rewards`.

        Raises RewardErrors if too many pairs could not be judged.
        """
        self.recorder.folder.log_samples(map(comparing.row_of, pairs))
        rows = rows_of(
            pairs,
            lambda pair: pair.ours,
            lambda members: {"pairs": len(members), **columns(members)},
        )
        metrics = comparing.metrics_of(pairs, columns)
        if rewards:
            metrics.update(rewards)
        self.report(metrics, rows)
        failed = [pair.error for pair in pairs if pair.win is None]
        self.errors.check_errors(failed, of=len(pairs), what="pairs could not be judged")


def rows_of(
    items: Sequence[T],
    episode: Callable[[T], Trajectory],
    columns: Callable[[Sequence[T]], Mapping[str, float]],
) -> dict[str, Mapping[str, float]]:
    """Return a row of `columns` per data source, plus a row "all" if there are several sources."""
    rows = {source: columns(members) for source, members in group_by_source(items, episode).items()}
    if len(rows) != 1:
        rows["all"] = columns(items)
    return rows


@dataclass(eq=False, repr=False)
class WrittenAnswers:
    """Stand-in for engines that returns the answer in each prompt's row."""

    answers: Sequence[list[int]]

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """Return the answer to the prompt whose index is in `key`."""
        _, index = cast(tuple[str, int], key)
        answer = self.answers[index]
        return [Generation(tokens=answer, logprobs=[0.0] * len(answer), finish_reason="stop")]

    async def rest(self) -> None:
        """Do nothing: there are no resources to release between prompts."""

    def metrics(self) -> dict[str, Metric]:
        """Return no metrics."""
        return {}
