"""Base classes for all commands, for commands with a model, for commands with a run folder, and for
training commands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, Self

from openrlhf.config import places, rules, shared, training_rules
from openrlhf.config.effects import without_effect
from openrlhf.config.flags import (
    Section,
    Unused,
    amend,
    mentions,
    option,
    spelled_out,
    switch,
    value_violations,
)
from openrlhf.config.unsupported import refusals


class Command(Section):
    """Base class of every command.

    `given` maps the path of each flag that the user set, on the command line or in a file, to its
    value. All other flags have their defaults.
    """

    given: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    plugin: tuple[str, ...] = option(
        (),
        "Python file that registers your own losses, estimators or tasks.",
        metavar="FILE.py",
        holds="place",
    )

    def resolve(self, *, command: str) -> tuple[Self, list[str]]:
        """Return a copy with all derived values set, and the notices."""
        values = self.derived_values()
        copy = amend(self, values | amend(self, values).common_values(command))
        return copy, spelled_out(copy, [*without_effect(copy), *copy.notices()])

    def check(self) -> list[str]:
        """Return one sentence per mistake: a value out of bounds, an unavailable feature, or a
        broken rule.

        Broken rules that mention a refused flag are omitted.
        """
        refused = dict(refusals(self))
        broken = spelled_out(self, self.violations())
        broken = [sentence for sentence in broken if not mentions(sentence, refused)]
        return [*value_violations(self), *refused.values(), *broken]

    def derived_values(self) -> dict[str, Any]:
        """Return the values derived from this command's flags, keyed by flag path."""
        return {}

    def unless_given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return only the values whose flags the user did not set."""
        return {path: value for path, value in values.items() if path not in self.given}

    def common_values(self, command: str) -> dict[str, Any]:
        """Return derived values that several commands share; called after `derived_values`."""
        return {}

    def notices(self) -> Iterator[str]:
        """Yield a sentence for each setting with a consequence that the user may not expect.

        `unused` covers flags that have no effect. In a sentence, <train.seed> is replaced by the
        flag and its value: --train.seed 42.
        """
        yield from rules.hub_notices(self)

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration, in the format of
        `notices`.
        """
        yield from rules.sources_exist(self)
        yield from places.overwriting(self)

    def idle_places(self) -> set[str]:
        """Return the output flags whose files or folders are not written with these settings."""
        return set()

    def further_places(self) -> list[places.Output]:
        """Return the outputs that have no flag."""
        return []


class ModelCommand(Command):
    """Base class of commands that use a model."""

    model: shared.ModelSourceConfig = shared.ModelSourceConfig()
    data: shared.TokenizerConfig = shared.TokenizerConfig()
    ds: shared.LoadingConfig = shared.LoadingConfig()
    dry_run: bool = switch(
        "Check everything, show the plan and the first batch, and exit.", saved=False
    )
    use_ms: bool = switch(
        "Download from ModelScope instead of the Hugging Face Hub.",
        not_yet="download the files first and give their paths",
    )

    def common_values(self, command: str) -> dict[str, Any]:
        """Return the attention implementation in effect."""
        return {"ds.attn_implementation": rules.attention_in_effect(self.ds, self.given)}

    def notices(self) -> Iterator[str]:
        """Yield notices about attention and data type."""
        yield from super().notices()
        yield from rules.loading_notices(self.ds, self.given)

    def violations(self) -> Iterator[str]:
        """Yield violations, including those about attention and data type."""
        yield from super().violations()
        yield from rules.loading_violations(self.ds)


class RecordedCommand(ModelCommand):
    """Base class of commands that have a run folder."""

    data: shared.DataConfig = shared.DataConfig()
    ds: shared.DeepSpeedConfig = shared.DeepSpeedConfig()
    logger: shared.LoggerConfig = shared.LoggerConfig()
    run: shared.RunConfig = shared.RunConfig()

    def common_values(self, command: str) -> dict[str, Any]:
        """Return the run folder, and None for a template without a placeholder for the prompt."""
        values = super().common_values(command)
        start = time.strftime("%Y%m%d-%H%M%S")
        values["run.dir"] = self.run.dir or f"./runs/{command}-{start}-{os.getpid()}"
        if "{}" not in (self.data.input_template or ""):
            values["data.input_template"] = None
        if self.ds.ring_attn_size > 1:
            values |= {"ds.packing_samples": True, "ds.attn_implementation": "sdpa"}
        return values

    def violations(self) -> Iterator[str]:
        """Yield violations, including those about layers that are split over ranks."""
        yield from super().violations()
        if self.ds.tensor_parallel_size == 1:
            return
        if self.ds.load_in_4bit:
            yield (
                "<ds.tensor_parallel_size> cannot split 4-bit weights: leave out "
                "--ds.load_in_4bit, or use --ds.tensor_parallel_size 1."
            )
        if self.ds.lora.rank and self.ds.lora.dora:
            yield (
                "<ds.tensor_parallel_size> cannot split the magnitudes of --ds.lora.dora: leave it "
                "out, or use --ds.tensor_parallel_size 1."
            )

    def notices(self) -> Iterator[str]:
        """Yield notices, including those about a template that may not do what the user expects."""
        yield from super().notices()
        if self.ds.ring_attn_size > 1 and not self.given.get("ds.packing_samples"):
            yield "--ds.packing_samples is on: <ds.ring_attn_size> divides packed rows over ranks."
        typed = self.given.get("data.input_template")
        template = self.data.input_template
        if typed is not None and template is None:
            yield (
                f"--data.input_template {typed!r} is ignored: it has no {{}} placeholder for the "
                "prompt."
            )
        if template and "\\n" in template:
            yield (
                "--data.input_template contains a backslash followed by an n, not a line break. "
                "In bash, write a line break as $'\\n'."
            )


class Root(RecordedCommand):
    """Base class of the training commands."""

    # True if the command evaluates even without --eval.dataset
    measures_training_rows: ClassVar[bool] = False

    train: shared.TrainConfig = shared.TrainConfig()
    eval: shared.EvalConfig = shared.EvalConfig()
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig()
    local_rank: int = option(-1, "Set by launchers, which also set LOCAL_RANK.", saved=False)

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint with the best evaluation result is kept."""
        key = self.ckpt.best_metric_key
        evaluates = bool(self.eval.dataset) or self.measures_training_rows
        return evaluates and key != "none" and bool(key or self.eval.patience)

    def idle_places(self) -> set[str]:
        """Return the checkpoint folder if the run neither writes nor reads it."""
        ckpt = self.ckpt
        writes = (ckpt.saves or self.keeps_best) and ckpt.has_files
        if writes or ckpt.load_enable:
            return set()
        return {"ckpt.path"}

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not (self.ckpt.saves or self.keeps_best):
            saving = ["ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_num", "ckpt.max_mem"]
            yield Unused(
                saving, "without --ckpt.save_steps or a best checkpoint (--ckpt.best_metric_key)"
            )
        if not (self.eval.dataset or self.measures_training_rows):
            yield Unused(["ckpt.best_metric_key", "eval.steps"], "without --eval.dataset")
        if not self.ckpt.load_enable:
            yield Unused(["ds.use_universal_ckpt"], "without --ckpt.load_enable")

    def notices(self) -> Iterator[str]:
        """Yield notices, including those about checkpoints."""
        yield from super().notices()
        yield from training_rules.checkpoint_notices(self.ckpt)

    def violations(self) -> Iterator[str]:
        """Yield violations, including those about adapters, precision and early stopping."""
        yield from super().violations()
        if self.ckpt.saves and not self.ckpt.max_num:
            yield "<ckpt.max_num> deletes the checkpoints of <ckpt.save_steps>: keep 1 or more."
        yield from training_rules.weight_violations(self.ds)
        yield from training_rules.patience_violations(self.eval, self.ckpt)
