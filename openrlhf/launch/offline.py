"""From the flags to a finished offline run: rows, schedule, engine, resume, loop."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.checkpoints.export import check_disk_room
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, RunState
from openrlhf.config.effects import unmet
from openrlhf.config.flags import flags_of, notice
from openrlhf.config.machine import is_first, world_size
from openrlhf.config.shared import CheckpointConfig
from openrlhf.config.supervised import PreferenceDataConfig, SFTDataConfig, SupervisedConfig
from openrlhf.core.batches import TokenRows
from openrlhf.data import clock, first_look
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.errors import DataError
from openrlhf.data.findings import report
from openrlhf.data.first_start import FirstStart
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import ALL_ROWS, Table, key_columns, load_datasets
from openrlhf.data.shown import SHOWN, show_batch, show_template
from openrlhf.data.templates import fill_template
from openrlhf.data.tokenizer import get_tokenizer, require_vocabulary
from openrlhf.data.trained_format import kept_format, prompts_in, with_trained_format
from openrlhf.launch.identity import offline_identity
from openrlhf.launch.precompute import with_reference
from openrlhf.launch.run_length import check_steps
from openrlhf.models.loading import ModelError, configuration, end_tokens
from openrlhf.models.proof import UNPROVEN, prove_layout
from openrlhf.models.stored_files import check_can_be_exported
from openrlhf.observability.recorder import Recorder
from openrlhf.trainers.supervised import SupervisedTrainer, layout_of
from openrlhf.trainers.tasks import Config, Micro, OfflineTask, Row, Rows, load_spec
from openrlhf.training.averaging import WeightAverage
from openrlhf.training.engine import TrainEngine
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import FrozenModel, Strategy

MORE_STEPS = "For more steps lower --train.batch_size, raise --train.max_epochs or use more rows."


def run_offline(task: OfflineTask[Config, Row, Micro]) -> None:
    """Train a task as its flags say: rows, schedule, engine, resume, loop. Runs in every process of
    the launcher.

    Raises DataError for too few rows, and CheckpointError if --ckpt.load_enable finds a checkpoint
    of another run.
    """
    config = task.config
    task.check_model()
    tokenizer = exportable_tokenizer(task)
    ds, train = config.ds, config.train
    # Before the rows, which the processes of a machine share.
    strategy: Strategy | None = None
    if not config.dry_run:
        layout = RankLayout.from_flags(ds, processes=world_size())
        strategy = Strategy(
            ds, layout, seed=train.seed, full_determinism=train.full_determinism_enable
        )
    checkpoints = CheckpointManager(config.ckpt, [""])
    checkpoint = newest(checkpoints, strategy) if strategy and config.ckpt.load_enable else None
    begun = first_start(checkpoint, strategy, tokenizer)
    train_rows, eval_rows = load_rows(task, tokenizer, follows=begun.trained_format)
    config = task.config
    total_steps = steps_per_epoch(config, train_rows) * config.train.max_epochs
    plan = plan_of(train_rows, total_steps, batch_size=config.train.batch_size)
    report(check_steps(total_steps, config, fix=MORE_STEPS))
    if eval_rows is None and (eval_rows := task.measured_rows(train_rows)):
        plan += f" Without --eval.dataset, {len(eval_rows)} training row(s) are evaluated."
    if not strategy:
        show_plan(plan, task, train_rows, tokenizer)
        return
    start = RunState(
        step=0,
        run_dir=os.path.abspath(config.run.dir),
        started=begun.moment,
        trained_format=begun.trained_format,
        engines={"": layout_of(strategy)},
        identity=offline_identity(task, train_rows),
        planned_updates=total_steps,
    )
    if checkpoint:
        check_continued(checkpoint, start, config)
        start = replace(start, run_dir=checkpoint.state.continued_folder(start.run_dir))
    train_loop(
        task,
        engine=load_models(task, strategy, total_steps, checkpoints),
        tokenizer=tokenizer,
        train_rows=train_rows,
        eval_rows=eval_rows,
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        start=start,
        plan=f"{plan} Processes: {strategy.layout.world_size}.",
    )


def train_loop(
    task: OfflineTask[Config, Row, Micro],
    *,
    engine: TrainEngine,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Rows,
    eval_rows: Any,
    checkpoints: CheckpointManager,
    checkpoint: Checkpoint | None,
    start: RunState,
    plan: str,
) -> None:
    """Train a loaded task from its start, or from a checkpoint, to the export."""
    recorder: Recorder | None = None
    if engine.strategy.is_main:
        resume_step = checkpoint and checkpoint.state.step
        recorder = Recorder(task.config, start.run_dir, resume_step=resume_step)
    with closing(recorder) if recorder else nullcontext():
        if recorder:
            recorder.display.note(plan)
            recorder.folder.write_texts(
                [show_template(tokenizer), *first_texts(task, train_rows, tokenizer)]
            )
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


def plan_of(rows: Rows, steps: int, *, batch_size: int) -> str:
    """Return the rows and steps of a run in words."""
    return f"{rows.summary} {steps} optimizer step(s) of {batch_size} rows; {len(rows) % batch_size} left over."


def exportable_tokenizer(task: OfflineTask[Config, Row, Micro]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model, after a check that it and the model's other files can be
    exported.
    """
    model = task.config.model
    trusted = model.trust_remote_code
    tokenizer = get_tokenizer(
        model.model_name_or_path,
        padding_side=task.padding_side,
        trust_remote_code=trusted,
        chat_template=task.config.data.tokenizer_chat_template,
    )
    if is_first():
        notice(
            *check_can_be_exported(model.model_name_or_path, tokenizer, trust_remote_code=trusted)
        )
    return tokenizer


def show_plan(
    plan: str, task: OfflineTask[Config, Row, Micro], rows: Rows, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print the results of a dry run."""
    if is_first():
        print(
            plan, show_template(tokenizer), *first_texts(task, rows, tokenizer), UNPROVEN, sep="\n"
        )


def first_texts(
    task: OfflineTask[Config, Row, Micro], rows: Rows, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """The first rows of the first optimizer step as the model will see them."""
    train = task.config.train
    order = ResumableSampler(len(rows), seed=train.seed, batch_size=train.batch_size)
    return show_batch(
        task.collate([rows[row] for row in islice(order, SHOWN)]), tokenizer, task.sample_names
    )


def newest(checkpoints: CheckpointManager, strategy: Strategy) -> Checkpoint | None:
    """Return the newest complete checkpoint, if there is one. Collective."""
    # One process looks: finding the newest checkpoint also tidies up after a save that was killed.
    return strategy.broadcast(checkpoints.latest() if strategy.is_main else None)


def first_start(
    checkpoint: Checkpoint | None, strategy: Strategy | None, tokenizer: PreTrainedTokenizerBase
) -> FirstStart:
    """Return the run's first start, the same on all ranks, and set the chat template's clock.
    Collective.
    """
    begun = checkpoint.state.first_start if checkpoint else FirstStart.here()
    begun = strategy.broadcast(begun) if strategy else begun
    clock.set_clock(tokenizer, begun.moment)
    return begun


def check_room(checkpoints: CheckpointManager, engine: TrainEngine, ckpt: CheckpointConfig) -> None:
    """Print a notice if the disk is too small for the checkpoints. Raises CheckpointError if not
    one fits.
    """
    if engine.strategy.is_main and ckpt.resumable:
        exported = engine.exported_bytes if ckpt.save_hf else 0
        notice(*checkpoints.check_room(engine.checkpoint_bytes + exported))


def check_continued(checkpoint: Checkpoint, start: RunState, config: SupervisedConfig) -> None:
    """Raise CheckpointError if this run cannot continue a checkpoint."""
    flags = "number of processes, --ds.zero_stage and --ds.param_dtype"
    checkpoint.check_continued_by(start, layout=flags, converts=config.ds.use_universal_ckpt)


def load_models(
    task: OfflineTask[Config, Row, Micro],
    strategy: Strategy,
    total_steps: int,
    checkpoints: CheckpointManager,
) -> TrainEngine:
    """The trained model with its optimizer. The frozen models of the task are stored in
    `task.frozen`.

    Raises ModelError if a model fails the proof of its layout, and UserError if its disks have no
    room for it.
    """
    engine = TrainEngine(strategy, task.load_model, task.config, total_steps=total_steps)
    if task.config.ds.lora.rank and not engine.partial:
        raise ModelError(
            f"--ds.lora.rank: load_model of the task {task.name} must take the settings of `trained_spec`"
        )
    if task.config.train.enable_ema:
        engine.average = WeightAverage(engine.module, strategy, task.config.train.ema_beta)
    models = task.frozen_models().items()
    task.frozen = {
        name: FrozenModel(strategy, load, offload=task.offloads) for name, load in models
    }
    prove_layout(engine.module)
    if strategy.is_main:
        check_disk_room(task.config.ckpt.output_dir, engine.exported_bytes)
    check_room(checkpoints, engine, task.config.ckpt)
    for frozen in task.frozen.values():
        prove_layout(frozen.on_device())
        frozen.rest()
    return engine


def load_rows(
    task: OfflineTask[Config, Row, Micro],
    tokenizer: PreTrainedTokenizerBase,
    *,
    follows: bool = True,
) -> tuple[Rows, Rows | None]:
    """The tokenized training and evaluation rows, of one layout and format, which become the task's
    configuration.

    --data.max_samples limits training rows only. `follows`: by default texts have the format that
    the model was trained with. Raises DataError, also for a frozen model with another vocabulary.
    """
    model, data, evaluation = task.config.model, task.config.data, task.config.eval
    owner, trusts = (
        f"--model.model_name_or_path {model.model_name_or_path}",
        model.trust_remote_code,
    )
    for flag, path in task.frozen_paths().items():
        if path is not None:
            require_vocabulary(tokenizer, path, flag=flag, owner=owner, trust_remote_code=trusts)
    seed, split, probs = task.config.train.seed, data.dataset_split, data.dataset_probs
    read = load_datasets(
        data.dataset, split=split, probs=probs, max_samples=data.max_samples, seed=seed
    )
    task.config = replace(task.config, data=recognise(read, task.config))
    prompts = task.prompt_column(read)
    if follows:
        data = with_trained_format(
            task.config, task.config.data, tokenizer, read, column=prompts, model=owner
        )
        task.config = replace(task.config, data=data)
    train = task.rows(read, tokenizer)
    report(*task.look_at_rows(train))
    texts = first_look.texts_of(read, key_columns(task.config.data))
    notice(*first_look_at(task, texts, train, tokenizer, prompts=prompts_in(read, prompts)))
    notice(*look_at_borders(task.config, read))
    if not evaluation.dataset:
        return train, None
    held_out = load_datasets(
        evaluation.dataset, split=evaluation.split, max_samples=ALL_ROWS, seed=seed
    )
    return train, task.rows(held_out, tokenizer)


def look_at_borders(config: SupervisedConfig, rows: Table) -> list[str]:
    """Return a notice if a prompt column and an answer column are joined with nothing between them."""
    data = config.data
    if data.apply_chat_template or data.input_template:
        return []
    columns: tuple[str | None, str | None] = (None, None)
    if isinstance(data, PreferenceDataConfig):
        columns = (data.prompt_key, data.chosen_key)
    elif isinstance(data, SFTDataConfig):
        columns = (data.input_key, data.output_key)
    prompt, answer = columns
    if not prompt or not answer:
        return []
    return first_look.glued(
        first_look.texts_of(rows, [prompt]), first_look.texts_of(rows, [answer])
    )


def first_look_at(
    task: OfflineTask[Config, Row, Micro],
    texts: Sequence[str],
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[Any] = (),
) -> list[str]:
    """Notices about the first rows, whose prompts are `prompts`. Raises DataError for lost text.

    Records the format of prompts in the tokenizer.
    """
    found = first_look.round_trip(tokenizer, texts)
    if (
        ends := end_tokens(configuration(load_spec(task.config)))
    ) and tokenizer.eos_token_id not in ends:
        found.append(
            f"The tokenizer ends texts with {tokenizer.eos_token} ({tokenizer.eos_token_id}), the model with {ends}."
        )
    first = [
        task.collate([rows[number]]) for number in range(min(first_look.FIRST_ROWS, len(rows)))
    ]
    ending = first_look.ending_of([row.tokens.tolist() for row in first], tokenizer)
    trained, used = first_look.recorded(tokenizer), task.text_format(tokenizer, ending)
    model = f"--model.model_name_or_path {task.config.model.model_name_or_path}"
    if not unmet(task.config, flags_of(task.config.__class__)["data.apply_chat_template"]):
        applied = task.config.data.apply_chat_template
        found += first_look.unused_chat_template(model, tokenizer, texts, applied=applied)
    if task.config.data.apply_chat_template:
        report(first_look.dated_template(tokenizer))
    if used:
        try:
            found += first_look.round_trip(
                tokenizer, [(used.input_template or "").replace("{}", "")]
            )
        except DataError as error:  # rows may go without the template's words
            found.append(f"--data.input_template: {error}")
        found += first_look.compare_formats(
            model, trained, used, texts
        ) + first_look.filled_already(used, texts)
        found += first_look.joined_border(used, tokenizer)
        found += (
            first_look.end_notices(ending, tokenizer, "Responses")
            if isinstance(first[0], TokenRows)
            else []
        )
    if used:
        read = [
            fill_template(used.input_template, prompt)
            for prompt in prompts
            if isinstance(prompt, str)
        ]
        used = kept_format(used, tokenizer, read)
    first_look.record(tokenizer, used)
    return found


def steps_per_epoch(config: SupervisedConfig, rows: Rows) -> int:
    """Optimizer steps per epoch, without an incomplete last batch. Raises DataError if the rows do
    not fill one batch.
    """
    size = config.train.batch_size
    if len(rows) < size:
        raise DataError(
            f"--data.dataset {config.data.dataset} has {len(rows)} usable rows, fewer than one batch: lower "
            f"--train.batch_size {size}. {rows.summary}"
        )
    return len(rows) // size
