"""`openrlhf eval`: a checkpoint by itself. pass@k per data source, the accuracy of reward models,
the win rate against others.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Literal, TypeVar, cast

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.play import AgentEpisodes
from openrlhf.cluster.placement import HostGroup, Placement, engine_group
from openrlhf.cluster.ray_cluster import places_now, ray_cluster
from openrlhf.cluster.worker_group import WorkerGroup, gather
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.core.trajectory import Trajectory
from openrlhf.data.errors import check_columns, text_of
from openrlhf.data.feedback import PreferenceDataset
from openrlhf.data.first_look import TextFormat, texts_of
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import Table, key_columns, load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.shown import show_text
from openrlhf.data.trained_format import with_trained_format
from openrlhf.evaluation import comparing
from openrlhf.evaluation.comparing import Columns, Comparison
from openrlhf.launch import prompt_data, settings
from openrlhf.launch.agents import check_agents, make_agents
from openrlhf.launch.processes import connect_hosts, make_hosts
from openrlhf.launch.prompt_data import (
    check_prompts,
    check_reward_models,
    look_at_prompts,
    policy_tokenizer,
    read_prompts,
)
from openrlhf.launch.ray_loss import RayLoss
from openrlhf.launch.reinforcement import show_prompts
from openrlhf.models.weights import require_finite_files
from openrlhf.observability.metrics import Metric
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import sample_row
from openrlhf.observability.tables import print_sources
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rewards.judge import Judge
from openrlhf.rewards.preview import check_reward
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rewards.rule import reward_of
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import engine_device
from openrlhf.rollout.episode_metrics import evaluation_metrics, group_by_source, source_columns
from openrlhf.rollout.fleet import Fleet
from openrlhf.rollout.generator import Engines, RolloutGenerator, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trainers.sources import evaluate
from openrlhf.trainers.stages import EarlyStages, RewardModels
from openrlhf.workers.frozen import RewardWorker

NOTE_EVERY_S = 30.0  # of progress, where there is no bar
T = TypeVar("T")


def run_evaluation(config: EvaluationConfig) -> None:
    """Evaluate as the flags say, on a running Ray cluster or a new one. Raises RewardErrors if too
    much failed.
    """
    check_engine_args(config.vllm.engine_args, engine_device())
    if config.samples_answers:
        offer_engines(config.rollout, config.reward)
        check_reward(config.reward)
    {"pass_k": run_pass_k, "rm_accuracy": run_rm_accuracy, "win_rate": run_win_rate}[config.task](
        config
    )


def run_pass_k(config: EvaluationConfig) -> None:
    """Sample answers to every prompt, reward them, and report pass@1 and pass@k per data source."""
    model, k = read_candidate(config, "model"), config.eval.n_samples_per_prompt
    if config.dry_run:
        return show_prompts(config, model.prompts)
    with started(config) as recorder:
        evaluation = Evaluation(config, recorder)
        answers = evaluation.rewarded(evaluation.answers(model, "vllm"))
        evaluation.recorder.folder.log_samples(
            sample_row(0, answer, evaluation=True) for answer in answers
        )
        evaluation.report(
            evaluation_metrics(answers, k=k),
            rows_of(answers, lambda t: t, partial(source_columns, k=k)),
        )
        evaluation.errors.check(answers)


def run_rm_accuracy(config: EvaluationConfig) -> None:
    """Reward both texts of every pair, and report how often the chosen text has the larger reward."""
    tokenizer, read = prompt_data.scorer_tokenizer(config), read_rows(config)
    data = recognise(read, config, "pairs")
    model = f"--reward.model_name_or_path {config.reward.models[0]}"
    data = with_trained_format(config, data, tokenizer, read, column=data.prompt_key, model=model)
    rows = PreferenceDataset(read, tokenizer, data)
    prompt_data.check_reward_formats(
        config, TextFormat.of(data, tokenizer), texts_of(read, key_columns(data))
    )
    if config.dry_run:
        chosen, rejected = (
            show_text(side, getattr(rows[0], side), tokenizer) for side in ("chosen", "rejected")
        )
        return print(rows.summary, chosen, rejected, sep="\n")
    with started(config) as recorder:
        evaluation = Evaluation(config, recorder)
        evaluation.recorder.display.note(rows.summary)
        chosen = [
            comparing.given_text(tokenizer, n, rows[n].datasource, rows[n].chosen)
            for n in range(len(rows))
        ]
        rejected = [
            comparing.given_text(tokenizer, n, rows[n].datasource, rows[n].rejected)
            for n in range(len(rows))
        ]
        pairs = evaluation.compared(chosen, rejected)
        evaluation.report_pairs(pairs, comparing.accuracy_columns, comparing.reward_metrics(pairs))


def run_win_rate(config: EvaluationConfig) -> None:
    """Sample answers of the model and of another, or read the others, and report how often the
    model's are better.
    """
    model = other = read_candidate(config, "model")
    written: list[list[int]] | None = None
    if config.against.answer_key:
        written = read_answers(config, model.tokenizer, config.against.answer_key)
    else:
        other = read_candidate(config, "against")
    judge = Judge(config.judge, config.reward) if config.judge.url else None
    if judge:
        asyncio.run(judge.engine.servers.check())
    if config.dry_run:
        return show_prompts(config, model.prompts)
    with started(config) as recorder:
        evaluation = Evaluation(config, recorder)
        ours = evaluation.answers(model, "vllm")
        theirs = (
            evaluation.answers(other, "against")
            if written is None
            else evaluation.written(model, written)
        )
        if judge:
            pairs = comparing.pair_up(ours, theirs)
            pairs = asyncio.run(comparing.judged(judge, pairs, (model.tokenizer, other.tokenizer)))
        else:
            pairs = evaluation.compared(ours, theirs)
        evaluation.report_pairs(pairs, comparing.win_columns)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that answers, and the prompts as its tokenizer and chat template render them."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptDataset


def read_candidate(config: EvaluationConfig, section: Literal["model", "against"]) -> Candidate:
    """Check a model's folder, and those of the reward models that will read its tokens. Raises
    ModelError or DataError.
    """
    path = (
        config.model.model_name_or_path if section == "model" else config.against.model_name_or_path
    )
    assert path is not None  # a rule
    flag = f"--{section}.model_name_or_path"
    model = f"{flag} {path}"
    tokenizer = policy_tokenizer(config, path, flag=flag)
    check_agents(config, tokenizer)
    check_reward_models(config, tokenizer, policy=model)
    source, split, most = config.eval.dataset, config.eval.split, config.data.max_samples
    prompts = read_prompts(
        config, PromptDataset, tokenizer, source, model=model, split=split, max_samples=most
    )
    look_at_prompts(config, prompts, tokenizer, policy=path, flag=flag)
    check_prompts(config, prompts)
    return Candidate(path=path, tokenizer=tokenizer, prompts=prompts)


def read_rows(config: EvaluationConfig) -> Table:
    """The rows of --eval.dataset."""
    held_out, most, seed = config.eval, config.data.max_samples, config.train.seed
    return load_datasets(held_out.dataset, split=held_out.split, max_samples=most, seed=seed)


def read_answers(
    config: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, column: str
) -> list[list[int]]:
    """The answers in a column as tokens, each with its end. Raises DataError."""
    rows = read_rows(config)
    check_columns(rows, {"--against.answer_key": column})
    texts = [text_of(row, column) for row in rows if isinstance(row, dict)]
    end = cast(int, tokenizer.eos_token_id)
    return [[*tokens, end] for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]


class Evaluation:
    """An evaluation with its run folder, on a Ray cluster. Engines and reward models start when
    they are needed, one after the other.
    """

    def __init__(self, config: EvaluationConfig, recorder: Recorder) -> None:
        self.config, self.recorder, self.logs = config, recorder, recorder.folder.logs
        self.errors = ErrorBudget(config.reward)

    def answers(self, model: Candidate, name: str) -> list[Trajectory]:
        """Samples of every prompt, rewarded by the reward function, server or verifier if there is
        one. Engines run only meanwhile.
        """
        config = self.config
        spec = settings.eval_sampling(config)
        self.recorder.display.note(
            f"{len(model.prompts)} prompts, {spec.n_samples} answers of {model.path} to each."
        )
        say_engines_start(self.recorder, config, model.path)
        with engines(config, model.path, model.tokenizer, name=name, logs=self.logs) as fleet:
            scored_later = config.reward.models or config.judge.url
            agents = make_agents(
                config, model.tokenizer, needs_reward=not scored_later, log_dir=self.logs
            )
            return self._sample(model, fleet, spec, agents)

    def written(self, model: Candidate, answers: Sequence[list[int]]) -> list[Trajectory]:
        """Written answers, one to each prompt, rewarded like sampled answers."""
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
        with (
            closing(BackgroundLoop()) as loop,
            reward_of(config.reward, log_dir=self.logs) as rule,
            closing(agents) if agents else nullcontext(),
        ):
            generator = RolloutGenerator(
                engines, model.tokenizer, rule, agents=agents, fallback=config.reward.fallback
            )
            progress = Progress(self.recorder, prompts=len(model.prompts))
            return evaluate(
                model.prompts,
                generator,
                loop,
                spec,
                step=0,
                timeout_s=config.train.step_timeout,
                finished=progress.count,
            )

    def rewarded(self, answers: Sequence[Trajectory]) -> list[Trajectory]:
        """The answers with the sums of their rewards. Reward models run only meanwhile."""
        if not self.config.reward.models:
            return EarlyStages(
                models=RewardModels(None, self.config.reward), timeout_s=0
            ).annotated(answers)
        with reward_models(self.config, logs=self.logs) as models:
            return models.annotated(answers)

    def compared(
        self, ours: Sequence[Trajectory], theirs: Sequence[Trajectory]
    ) -> list[Comparison]:
        """The pairs; the answer with the larger reward is the better one."""
        scored = self.rewarded([*ours, *theirs])
        pairs = comparing.pair_up(scored[: len(ours)], scored[len(ours) :])
        return [replace(pair, win=comparing.by_reward(pair)) for pair in pairs]

    def report(self, metrics: Mapping[str, float], rows: Mapping[str, Mapping[str, float]]) -> None:
        """Log the numbers, and print them by data source."""
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
        """Report pairs by these columns, and write the pairs down. Raises RewardErrors if too many
        could not be judged.
        """
        self.recorder.folder.log_samples(map(comparing.row_of, pairs))
        rows = rows_of(
            pairs,
            lambda pair: pair.ours,
            lambda members: {"pairs": len(members), **columns(members)},
        )
        self.report({**comparing.metrics_of(pairs, columns), **(rewards or {})}, rows)
        failed = [pair.error for pair in pairs if pair.win is None]
        self.errors.check_errors(failed, of=len(pairs), what="pairs could not be judged")


class Progress:
    """Display of how many prompts have all their answers: beside the bar, or in a line every half
    minute.
    """

    def __init__(self, recorder: Recorder, *, prompts: int) -> None:
        self.display, self.prompts = recorder.display, prompts
        self.done, self.noted = 0, monotonic()

    def count(self, group: Sequence[Trajectory]) -> None:
        """Count a prompt whose answers are finished and rewarded."""
        self.done += 1
        text = f"{self.done} of {self.prompts} prompts answered"
        self.display.status(text)
        if not self.display.live and monotonic() - self.noted >= NOTE_EVERY_S:
            self.noted = monotonic()
            self.display.note(f"{text}.")


def say_engines_start(recorder: Recorder, config: settings.Engines, path: str) -> None:
    """Print that engines are loading a model: nothing else is printed until they have."""
    recorder.display.status("starting engines")
    recorder.display.note(
        f"Starting {config.vllm.num_engines} engine(s) of {path}; logs: {recorder.folder.logs}"
    )


@contextmanager
def engines(
    config: settings.Engines,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    logs: Path,
) -> Iterator[Fleet]:
    """Run the engines of a model until the block exits. Raises ModelError for weights that are NaN
    or infinite.
    """
    require_finite_files(path)  # vLLM reads the files by itself
    plan = alone(engine_group(config.vllm, name))
    [group], made_of = (
        plan.groups,
        settings.engine_settings(config, path, engine_device(), tokenizer),
    )
    with (
        closing(Fleet(group, places_now(plan)[name], on_gpus=plan.on_gpus)) as fleet,
        fleet.naming_logs(),
    ):
        fleet.start(made_of, log_dir=str(logs), timeout_s=config.train.setup_timeout)
        fleet.wait()
        yield fleet
        fleet.stop()


@contextmanager
def reward_models(config: settings.Sampling, *, logs: Path) -> Iterator[EarlyStages]:
    """The reward models, which run within it."""
    plan = alone(reward_hosts(config))
    [group] = plan.groups
    machines = places_now(plan)[group.name]
    with closing(make_hosts(group, machines, config.ds, on_gpus=plan.on_gpus)) as hosts:
        connect_hosts(config, hosts, log_dir=str(logs))
        workers = WorkerGroup(hosts, "reward")
        created = workers.create(RewardWorker, settings.reward_settings(config))
        gather(created, timeout_s=config.train.setup_timeout, doing="load the models")
        yield EarlyStages(
            models=RewardModels(workers, config.reward), timeout_s=config.train.step_timeout
        )


def alone(group: HostGroup) -> Placement:
    """A group that has the devices to itself."""
    return Placement(groups=(group,), on_gpus=engine_device() == "cuda")


@contextmanager
def started(config: EvaluationConfig | BatchInferenceConfig) -> Iterator[Recorder]:
    """A run folder of its own, and a Ray cluster that is there or is started for it."""
    loss = RayLoss()
    with (
        closing(Recorder(config, config.run.dir)) as recorder,
        loss.closing(recorder.close),
        ray_cluster(largest_phase(config), loss),
    ):
        yield recorder
        loss.finished = True


def rows_of(
    items: Sequence[T],
    episode: Callable[[T], Trajectory],
    columns: Callable[[Sequence[T]], Mapping[str, float]],
) -> dict[str, Mapping[str, float]]:
    """A row of `columns` per data source, and if there are several sources, a row of everything."""
    rows = {source: columns(members) for source, members in group_by_source(items, episode).items()}
    return rows if len(rows) == 1 else rows | {"all": columns(items)}


def largest_phase(config: EvaluationConfig | BatchInferenceConfig) -> Placement:
    """The processes that run at one time: engines, or reward models."""
    phases = [engine_group(config.vllm, "vllm")] if config.samples_answers else []
    if config.reward.models:
        phases.append(reward_hosts(config))
    return alone(max(phases, key=lambda group: group.slots))


def reward_hosts(config: settings.Sampling) -> HostGroup:
    """The processes of the reward models."""
    nodes, slots = config.reward.num_nodes, config.reward.num_gpus_per_node
    return HostGroup(name="reward", roles=("reward",), nodes=nodes, per_node=slots)


class WrittenAnswers:
    """Answers in place of engines that sample: for each prompt, the answer of its row."""

    def __init__(self, answers: Sequence[list[int]]) -> None:
        self._answers = answers

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """The answer of the prompt whose index is in the key."""
        answer = self._answers[cast(tuple[str, int], key)[1]]
        return [Generation(tokens=answer, logprobs=[0.0] * len(answer), finish_reason="stop")]

    async def rest(self) -> None:
        """Nothing is held between prompts."""

    def metrics(self) -> dict[str, Metric]:
        """Nothing is measured."""
        return {}
