"""An offline training run, from the flags to the exported model."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.checkpoints.export import check_disk_room
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint
from openrlhf.checks import Finding, collect, report
from openrlhf.config.effects import unused_flags
from openrlhf.config.machine import world_size
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.core.batches import TokenRows
from openrlhf.data import clock, first_look
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import FirstStart
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import ALL_ROWS, Table, key_columns, load_datasets
from openrlhf.data.shown import SHOWN, show_batch, show_template
from openrlhf.data.templates import fill_template
from openrlhf.data.tokenizer import get_tokenizer, require_vocabulary
from openrlhf.data.trained_format import kept_format, prompts_in, with_trained_format
from openrlhf.launch.beginning import initial_state, record_plan
from openrlhf.launch.identity import offline_identity
from openrlhf.launch.planning import drive_findings, memory_findings, plan_lines, plan_of_run
from openrlhf.launch.precompute import with_reference
from openrlhf.launch.run_length import check_steps
from openrlhf.locks import check_unlocked
from openrlhf.models.loading import ModelError, configuration, end_tokens
from openrlhf.models.proof import UNPROVEN, prove_layout
from openrlhf.models.stored_files import check_can_be_exported
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import TEXTS
from openrlhf.planning.plan import Plan as MemoryPlan
from openrlhf.reporting import is_first, say
from openrlhf.termination import exit_on_signals
from openrlhf.trainers.supervised import SupervisedTrainer, layout_of
from openrlhf.trainers.tasks import Config, Micro, OfflineTask, Row, Rows, load_spec
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.engine import TrainEngine
from openrlhf.training.gathered import exported_bytes
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import FrozenModel, Strategy

LAYOUT_FLAGS = (
    "number of processes, --ds.zero_stage, --ds.tensor_parallel_size, --ds.param_dtype and --optim"
)
MORE_STEPS = "For more steps, lower --train.batch_size, raise --train.max_epochs or use more rows."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's rows, number of optimizer steps and memory plan."""

    train_rows: Rows
    eval_rows: Any  # evaluation rows, or None
    total_steps: int
    summary: str
    memory: MemoryPlan | None  # None if the model or the devices are not known


@exit_on_signals()
def run_offline(task: OfflineTask[Config, Row, Micro]) -> None:
    """Train a task, or print its plan for --dry_run.

    Every process of the launcher calls this function. Raises DataError if there are too few rows,
    and CheckpointError if --ckpt.load_enable finds a checkpoint of a different run.
    """
    task.check_model()
    tokenizer = exportable_tokenizer(task)
    checkpoints = CheckpointManager(task.config.ckpt)
    if not task.config.dry_run:
        train(task, tokenizer, checkpoints)
        return
    if is_first() and task.config.ckpt.load_enable:
        check_continuation(task.config, checkpoints)
    plan = make_plan(task, tokenizer, FirstStart.here())
    if is_first():
        shown = first_texts(task, plan.train_rows, tokenizer)
        say(plan.summary, *plan_lines(plan.memory), show_template(tokenizer), *shown, UNPROVEN)


def check_continuation(config: SupervisedConfig, checkpoints: CheckpointManager) -> None:
    """Check, during a dry run, the checkpoint that the real run would resume.

    Warns if there is no checkpoint. Raises InUseError if another process is writing to the
    checkpoint's run folder. The settings of the checkpoint's run are not compared with this run's
    settings.
    """
    run_dir = os.path.abspath(config.run.dir)
    checkpoint = checkpoints.latest()
    if checkpoint:
        run_dir = checkpoint.state.continued_folder(run_dir)
    check_unlocked(Path(run_dir), f"--run.dir {run_dir}")


def train(
    task: OfflineTask[Config, Row, Micro],
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: CheckpointManager,
) -> None:
    """Train a task from the start or from a checkpoint, and export the model."""
    ds = task.config.ds
    # Create the strategy before loading the rows, because processes on the same machine share them.
    strategy = Strategy(
        ds,
        RankLayout.from_flags(ds, processes=world_size()),
        seed=task.config.train.seed,
        full_determinism=task.config.train.full_determinism_enable,
    )
    checkpoint: Checkpoint | None = None
    if task.config.ckpt.load_enable:
        # Only one process searches for a checkpoint.
        # The search also deletes incomplete checkpoints.
        checkpoint = strategy.broadcast(checkpoints.latest() if strategy.is_main else None)
    first_start = checkpoint.state.first_start if checkpoint else FirstStart.here()
    first_start = strategy.broadcast(first_start)
    plan = make_plan(task, tokenizer, first_start)
    start = initial_state(
        task.config,
        checkpoint,
        first_start,
        layout=LAYOUT_FLAGS,
        engines={"": layout_of(strategy, task.config.optim)},
        identity=offline_identity(task, plan.train_rows),
        planned_updates=plan.total_steps,
    )
    engine = load_models(task, strategy, plan.total_steps, checkpoints)
    with recording(task, tokenizer, plan, strategy, start.run_dir, checkpoint) as recorder:
        train_rows = plan.train_rows
        eval_rows = plan.eval_rows
        if task.precomputes:
            train_rows = with_reference(task, train_rows, engine)
            if eval_rows:
                eval_rows = with_reference(task, eval_rows, engine)
            task.frozen = {}
        trainer = SupervisedTrainer(
            task,
            engine,
            tokenizer=tokenizer,
            train_rows=train_rows,
            eval_rows=eval_rows,
            checkpoints=checkpoints,
            recorder=recorder,
            start=start,
        )
        if checkpoint:
            trainer.resume(checkpoint)
        trainer.fit()


@contextmanager
def recording(
    task: OfflineTask[Config, Row, Micro],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    strategy: Strategy,
    run_dir: str,
    checkpoint: Checkpoint | None,
) -> Iterator[Recorder | None]:
    """Open the run folder in the main process, and close it when the block exits."""
    if not strategy.is_main:
        yield None
        return
    resume_step = checkpoint.state.step if checkpoint else None
    with closing(Recorder(task.config, run_dir, resume_step=resume_step)) as recorder:
        recorder.display.note(f"{plan.summary} Processes: {strategy.layout.world_size}.")
        texts = first_texts(task, plan.train_rows, tokenizer)
        recorder.folder.write_lines(TEXTS, [show_template(tokenizer), *texts])
        record_plan(plan.memory, recorder)
        yield recorder


def make_plan(
    task: OfflineTask[Config, Row, Micro],
    tokenizer: PreTrainedTokenizerBase,
    first_start: FirstStart,
) -> Plan:
    """Read the rows and count the optimizer steps.

    Chat templates that render the current date use the date of `first_start`. Raises DataError if
    there are fewer rows than one batch.
    """
    clock.set_clock(tokenizer, first_start.moment)
    rows, eval_rows = load_rows(task, tokenizer, follows=first_start.trained_format)
    config = task.config
    size = config.train.batch_size
    if len(rows) < size:
        raise DataError(
            f"--data.dataset {config.data.dataset} has {len(rows)} usable rows, fewer than one "
            f"batch. Lower --train.batch_size {size}. {rows.summary}"
        )
    steps_per_epoch, unused = divmod(len(rows), size)  # an incomplete last batch is dropped
    steps = steps_per_epoch * config.train.max_epochs
    memory = plan_of_run(config)
    report(
        *check_steps(steps, config, fix=MORE_STEPS),
        *memory_findings(config, memory),
        *drive_findings(config.ds, memory),
    )
    summary = (
        f"{rows.summary} {steps} optimizer step(s) of {size} rows; {unused} row(s) unused per "
        "epoch."
    )
    if eval_rows is None:
        eval_rows = task.measured_rows(rows)
        if eval_rows:
            summary += f" --eval.dataset is not set: evaluating {len(eval_rows)} training row(s)."
    return Plan(
        train_rows=rows, eval_rows=eval_rows, total_steps=steps, summary=summary, memory=memory
    )


def exportable_tokenizer(task: OfflineTask[Config, Row, Micro]) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer after checking that the model's files can be exported."""
    model = task.config.model
    tokenizer = get_tokenizer(
        model.model_name_or_path,
        padding_side=task.padding_side,
        trust_remote_code=model.trust_remote_code,
        chat_template=task.config.data.tokenizer_chat_template,
    )
    if is_first():
        found = check_can_be_exported(
            model.model_name_or_path, tokenizer, trust_remote_code=model.trust_remote_code
        )
        report(*found)
    return tokenizer


def first_texts(
    task: OfflineTask[Config, Row, Micro], rows: Rows, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield the first rows of the first optimizer step as the model sees them."""
    train = task.config.train
    order = ResumableSampler(len(rows), seed=train.seed, batch_size=train.batch_size)
    batch = task.collate([rows[row] for row in islice(order, SHOWN)])
    return show_batch(batch, tokenizer, task.sample_names)


def load_models(
    task: OfflineTask[Config, Row, Micro],
    strategy: Strategy,
    total_steps: int,
    checkpoints: CheckpointManager,
) -> TrainEngine:
    """Load the model to train with its optimizer, and load the frozen models into `task.frozen`.

    Prints a notice if the disk is too small for all checkpoints. Raises CheckError if a model gives
    wrong results on packed or padded rows, or if the disk is too small for the export or a single
    checkpoint.
    """
    config = task.config
    engine = TrainEngine(strategy, task.load_model, config, total_steps=total_steps)
    if config.ds.lora.rank and not engine.partial:
        raise ModelError(
            f"--ds.lora.rank has no effect on the task {task.name}: its load_model must load the "
            "model with the settings from `trained_spec`"
        )
    if config.train.enable_ema:
        engine.average = WeightAverage(engine.module, strategy, config.train.ema_beta)
    frozen: dict[str, FrozenModel] = {}
    for name, load in task.frozen_models().items():
        frozen[name] = FrozenModel(strategy, load, offload=task.offloads)
    task.frozen = frozen
    found = prove_layout(engine.module)
    if strategy.is_main:
        found += check_disk_room(config.ckpt.output_dir, exported_bytes(engine))
        if config.ckpt.resumable:
            needed = engine.checkpoint_bytes
            if config.ckpt.save_hf:
                needed += exported_bytes(engine)
            found += checkpoints.check_room(needed)
    for model in frozen.values():
        found += prove_layout(model.on_device())
        model.rest()
    report(*found)
    return engine


def load_rows(
    task: OfflineTask[Config, Row, Micro],
    tokenizer: PreTrainedTokenizerBase,
    *,
    follows: bool = True,
) -> tuple[Rows, Rows | None]:
    """Return the tokenized training and evaluation rows.

    The detected columns and text format are stored in the task's configuration. --data.max_samples
    limits only the training rows. If `follows` is true, the default text format is the format in
    which the model was trained. Raises DataError for invalid data, and for a frozen model with a
    different vocabulary.
    """
    config = task.config
    trusted = config.model.trust_remote_code
    owner = f"--model.model_name_or_path {config.model.model_name_or_path}"
    for flag, path in task.frozen_paths().items():
        if path is not None:
            require_vocabulary(tokenizer, path, flag=flag, owner=owner, trust_remote_code=trusted)
    table = load_datasets(
        config.data.dataset,
        split=config.data.dataset_split,
        probs=config.data.dataset_probs,
        max_samples=config.data.max_samples,
        seed=config.train.seed,
    )
    task.config = replace(config, data=recognise(table, config))
    column = task.prompt_column(table)
    if follows:
        data = with_trained_format(
            task.config, task.config.data, tokenizer, table, column=column, model=owner
        )
        task.config = replace(task.config, data=data)
    sets: list[Rows] = []

    def read_training_rows() -> list[Finding]:
        rows = task.rows(table, tokenizer)
        sets.append(rows)
        return collect(
            partial(task.look_at_rows, rows),
            partial(look_at_first_rows, task, table, rows, tokenizer, column=column),
            partial(look_at_borders, task.config, table),
        )

    def read_evaluation_rows() -> None:
        if config.eval.dataset:
            held_out = load_datasets(
                config.eval.dataset,
                split=config.eval.split,
                max_samples=ALL_ROWS,
                seed=config.train.seed,
            )
            sets.append(task.rows(held_out, tokenizer))

    report(*collect(read_training_rows, read_evaluation_rows))
    return sets[0], sets[1] if config.eval.dataset else None


def look_at_borders(config: SupervisedConfig, table: Table) -> list[Finding]:
    """Return a notice if prompts and answers from two columns are joined without a separator."""
    if config.data.apply_chat_template or config.data.input_template:
        return []
    columns = vars(config.data)
    prompt = columns.get("prompt_key") or columns.get("input_key")
    answer = columns.get("chosen_key") or columns.get("output_key")
    if not prompt or not answer:
        return []
    prompts = first_look.texts_of(table, [prompt])
    return first_look.glued(prompts, first_look.texts_of(table, [answer]))


def look_at_first_rows(
    task: OfflineTask[Config, Row, Micro],
    table: Table,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    column: str | None,
) -> list[Finding]:
    """Return findings about the first rows. Raises DataError if tokenization loses text.

    `rows` are the tokenized rows of `table`, whose prompts are in `column`. Records the prompts'
    text format in the tokenizer.
    """
    config = task.config
    texts = first_look.texts_of(table, key_columns(config.data))
    found = first_look.round_trip(tokenizer, texts)
    ends = end_tokens(configuration(load_spec(config)))
    if ends and tokenizer.eos_token_id not in ends:
        seen = (
            f"The tokenizer's end-of-text token is {tokenizer.eos_token} "
            f"({tokenizer.eos_token_id}), but the model's configuration lists {ends}."
        )
        found.append(Finding(seen))
    number = min(first_look.FIRST_ROWS, len(rows))
    batches = [task.collate([rows[row]]) for row in range(number)]
    ending = first_look.ending_of([batch.tokens.tolist() for batch in batches], tokenizer)
    used = task.text_format(tokenizer, ending)
    model = f"--model.model_name_or_path {config.model.model_name_or_path}"
    applied = config.data.apply_chat_template
    if "data.apply_chat_template" not in unused_flags(config):
        found += first_look.unused_chat_template(model, tokenizer, texts, applied=applied)
    if applied:
        found += first_look.dated_template(tokenizer)
    if used:
        template = used.input_template or ""
        try:
            found += first_look.round_trip(tokenizer, [template.replace("{}", "")])
        except DataError as error:  # the rows may not contain the template's words
            found.append(Finding(f"--data.input_template: {error}"))
        trained = first_look.recorded(tokenizer)
        found += first_look.compare_formats(model, trained, used, texts)
        found += first_look.filled_already(used, texts)
        found += first_look.joined_border(used, tokenizer)
        if isinstance(batches[0], TokenRows):
            found += first_look.check_ending(ending, tokenizer, "Responses")
        prompts = [prompt for prompt in prompts_in(table, column) if isinstance(prompt, str)]
        read = [fill_template(used.input_template, prompt) for prompt in prompts]
        used = kept_format(used, tokenizer, read)
    first_look.record(tokenizer, used)
    return found
