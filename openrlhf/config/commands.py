"""Bases of the commands: the flags of every command, and of commands with a model, with a run
folder, and with training.
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
    value_violations,
)
from openrlhf.config.unsupported import refusals


class Command(Section):
    """The base of every command.

    `given`: the values by path that flags and a file gave; all others are defaults.
    """

    given: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    plugin: tuple[str, ...] = option(
        (),
        "Python file that registers your own losses, estimators or tasks.",
        metavar="FILE.py",
        holds="place",
    )

    def resolve(self, *, command: str) -> tuple[Self, list[str]]:
        """Return a copy with all derived values, and the notices."""
        values = self.derived_values()
        copy = amend(self, values | amend(self, values).common_values(command))
        return copy, spelled_out(copy, [*without_effect(copy, self.given), *copy.notices()])

    def check(self) -> list[str]:
        """Return a sentence for everything that is wrong: bounds, missing features, broken rules.

        Broken rules about a flag that is refused anyway are left out.
        """
        refused = dict(refusals(self))
        broken = spelled_out(self, self.violations())
        broken = [sentence for sentence in broken if not mentions(sentence, refused)]
        return [*value_violations(self), *refused.values(), *broken]

    def derived_values(self) -> dict[str, Any]:
        """Return what follows from the flags of this command, by path."""
        return {}

    def unless_given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values whose flags were not given, by path."""
        return {path: value for path, value in values.items() if path not in self.given}

    def common_values(self, command: str) -> dict[str, Any]:
        """Return what follows in several commands once `derived_values` are set, by path."""
        return {}

    def notices(self) -> Iterator[str]:
        """Yield a sentence for each setting whose consequence the user may not expect.

        `unused` covers flags without an effect. In a sentence, <train.seed> stands for the flag as
        it is typed: --train.seed 42.
        """
        yield from ()

    def violations(self) -> Iterator[str]:
        """Yield what is wrong with this resolved configuration, in sentences as of `notices`."""
        yield from rules.sources_exist(self)
        yield from places.overwriting(self)

    def idle_places(self) -> set[str]:
        """Return the output flags whose folders or files the command does not write with these
        values.
        """
        return set()

    def further_places(self) -> list[tuple[str, str, str]]:
        """Return the outputs without a flag of their own: name, path, and kind (`places`)."""
        return []


class ModelCommand(Command):
    """The base of commands with a model."""

    model: shared.ModelSourceConfig = shared.ModelSourceConfig()
    data: shared.TokenizerConfig = shared.TokenizerConfig()
    ds: shared.LoadingConfig = shared.LoadingConfig()
    dry_run: bool = option(False, "Check everything, show plan and first batch, stop.", saved=False)
    use_ms: bool = option(False, "Download from ModelScope instead of the Hugging Face hub.")

    def common_values(self, command: str) -> dict[str, Any]:
        """Return the attention that is used."""
        return {"ds.attn_implementation": rules.attention_in_effect(self.ds, self.given)}

    def notices(self) -> Iterator[str]:
        """Yield notices about attention and data type."""
        yield from super().notices()
        yield from rules.loading_notices(self.ds, self.given)

    def violations(self) -> Iterator[str]:
        """Yield what is wrong: also with attention and data type."""
        yield from super().violations()
        yield from rules.loading_violations(self.ds)


class RecordedCommand(ModelCommand):
    """The base of commands with a run folder."""

    data: shared.DataConfig = shared.DataConfig()
    ds: shared.DeepSpeedConfig = shared.DeepSpeedConfig()
    logger: shared.LoggerConfig = shared.LoggerConfig()
    run: shared.RunConfig = shared.RunConfig()

    def common_values(self, command: str) -> dict[str, Any]:
        """Return the folder of the run, and no template if it has no place for the prompt."""
        values = super().common_values(command)
        start = time.strftime("%Y%m%d-%H%M%S")
        values["run.dir"] = self.run.dir or f"./runs/{command}-{start}-{os.getpid()}"
        if "{}" not in (self.data.input_template or ""):
            values["data.input_template"] = None
        return values

    def notices(self) -> Iterator[str]:
        """Yield notices, also about a template that is not what it seems to be."""
        yield from super().notices()
        typed, template = self.given.get("data.input_template"), self.data.input_template
        if typed is not None and template is None:
            yield f"--data.input_template {typed!r} has no {{}} for the prompt and is not used."
        if template and "\\n" in template:
            yield (
                "--data.input_template has a backslash and an n, not a line break; in bash a line "
                "break is written $'\\n'."
            )


class Root(RecordedCommand):
    """The base of training commands."""

    measures_training_rows: ClassVar[bool] = False  # evaluates without --eval.dataset too

    train: shared.TrainConfig = shared.TrainConfig()
    eval: shared.EvalConfig = shared.EvalConfig()
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig()
    local_rank: int = option(-1, "Set by launchers, which set LOCAL_RANK too.", saved=False)

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint of the best evaluation is kept."""
        key = self.ckpt.best_metric_key
        evaluates = bool(self.eval.dataset) or self.measures_training_rows
        return evaluates and key != "none" and bool(key or self.eval.patience)

    def idle_places(self) -> set[str]:
        """Return the folder of checkpoints if the run neither writes nor reads there."""
        ckpt = self.ckpt
        writes = (ckpt.saves or self.keeps_best) and (ckpt.save_hf or not ckpt.disable_ds)
        if writes or ckpt.load_enable:
            return set()
        return {"ckpt.path"}

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield from super().unused()
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
        """Yield notices, also about checkpoints."""
        yield from super().notices()
        yield from training_rules.checkpoint_notices(self.ckpt)

    def violations(self) -> Iterator[str]:
        """Yield what is wrong: also with adapters, precision, offload and early stopping."""
        yield from super().violations()
        yield from training_rules.weight_violations(self.ds)
        yield from training_rules.average_violations(self.ds, self.train)
        yield from training_rules.patience_violations(self.eval, self.ckpt)
