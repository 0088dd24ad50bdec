"""What commands have in common: the flags of every command, of those with a model, with a run
folder, and of training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Self

from openrlhf.config import machine, places, rules, shared
from openrlhf.config.effects import Effects, Sentences, combined, without_effect
from openrlhf.config.flags import Section, amend, bound_violations, mentions, option, spelled_out
from openrlhf.config.unsupported import refusals


class Command(Section):
    """What every command has. `given`: the values by path that flags and a file gave; all others
    are defaults.
    """

    always: ClassVar[bool] = True  # `!always` is a condition that never holds
    effects: ClassVar[
        Effects
    ] = {}  # conditions of this command, and the flags and sections that have them

    given: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    plugin: tuple[str, ...] = option(
        (), "Your file with registrations.", metavar="FILE.py", holds="place"
    )

    @property
    def uses_gpus(self) -> bool:
        """Whether there are GPUs."""
        return machine.count_gpus() > 0

    def resolve(self, *, command: str) -> tuple[Self, list[str]]:
        """A copy with all derived values, and notices."""
        values = self.derived_values()
        copy = amend(self, values | amend(self, values).common_values(command))
        return copy, spelled_out(copy, [*without_effect(copy, self.given), *copy.notices()])

    def check(self) -> list[str]:
        """All that is wrong, one sentence each: out of bounds, not available yet, broken rules.

        A rule about a flag that is refused anyway says nothing.
        """
        refused = dict(refusals(self))
        broken = [
            text for text in spelled_out(self, self.mistakes()) if not mentions(text, refused)
        ]
        return [*bound_violations(self), *refused.values(), *broken]

    def derived_values(self) -> dict[str, Any]:
        """What follows from the flags of this command, by path."""
        return {}

    def unless_given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of these values by path whose flags were not given."""
        return {path: value for path, value in values.items() if path not in self.given}

    def common_values(self, command: str) -> dict[str, Any]:
        """What follows in several commands once a command's own values are derived, by path."""
        return {}

    def notices(self) -> Sentences:
        """What the user may have to know of this resolved configuration, besides flags without an
        effect.
        """
        return []

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        return [*rules.sources_exist(self), *places.overwriting(self)]

    def idle_places(self) -> set[str]:
        """The paths of output flags whose folders or files this command does not write, given its
        other flags.
        """
        return set()

    def further_places(self) -> list[tuple[str, str, str]]:
        """Outputs of the command that have no flag of their own: name, path, and kind (`places`)."""
        return []


# fmt: off
class ModelCommand(Command):
    """What every command with a model has."""
    model: shared.ModelSourceConfig = shared.ModelSourceConfig()
    data: shared.TokenizerConfig = shared.TokenizerConfig()
    ds: shared.LoadingConfig = shared.LoadingConfig()
    dry_run: bool = option(False, "Check everything, show plan and first batch, stop.", saved=False)
    use_ms: bool = option(False, "Download from ModelScope instead of the Hugging Face hub.")

    def common_values(self, command: str) -> dict[str, Any]:
        """The attention that is used."""
        return {"ds.attn_implementation": rules.attention_in_effect(self.ds, self.given)}

    def notices(self) -> Sentences:
        """What the user may not expect of attention and data type."""
        return [*super().notices(), *rules.loading_notices(self.ds, self.given)]

    def mistakes(self) -> Sentences:
        """Attention is known, and goes together with the data type."""
        attention = self.ds.attn_implementation
        return [
            *super().mistakes(),
            ("/" not in attention and attention not in rules.ATTENTIONS,
             f"<ds.attn_implementation> is unknown: use {', '.join(rules.ATTENTIONS)}, or OWNER/KERNEL of the hub."),
            *combined(self, "refused", "model"),
            (self.ds.param_dtype == "fp32" and "flash_attention" in attention,
             "<ds.param_dtype> needs --ds.attn_implementation sdpa: FlashAttention has no fp32."),
        ]


class RecordedCommand(ModelCommand):
    """What every command with a run folder has."""
    data: shared.DataConfig = shared.DataConfig()
    ds: shared.DeepSpeedConfig = shared.DeepSpeedConfig()
    logger: shared.LoggerConfig = shared.LoggerConfig()
    run: shared.RunConfig = shared.RunConfig()

    def common_values(self, command: str) -> dict[str, Any]:
        """The folder of the run, and a template that has a place for the prompt."""
        template = self.data.input_template or ""
        return {
            **super().common_values(command),
            "run.dir": self.run.dir or f"./runs/{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            "data.input_template": template if "{}" in template else None,
        }

    def notices(self) -> Sentences:
        """Templates that are not what they seem to be."""
        template = self.given.get("data.input_template")
        return [
            *super().notices(),
            (template is not None and self.data.input_template is None,
             f"--data.input_template {template!r} has no {{}} for the prompt and is not used."),
            ("\\n" in (self.data.input_template or ""), "--data.input_template has a backslash and "
             "an n, not a line break; in bash a line break is written $'\\n'."),
        ]


class Root(RecordedCommand):
    """What every training command has."""
    measures_training_rows: ClassVar[bool] = False  # evaluates without --eval.dataset too

    train: shared.TrainConfig = shared.TrainConfig()
    eval: shared.EvalConfig = shared.EvalConfig()
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig()
    local_rank: int = option(-1, "Set by launchers, which set LOCAL_RANK too.", saved=False)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation is kept."""
        key, evaluates = self.ckpt.best_metric_key, bool(self.eval.dataset) or self.measures_training_rows
        return evaluates and key != "none" and bool(key or self.eval.patience)

    def idle_places(self) -> set[str]:
        """The folder of checkpoints, if the run neither writes nor reads there."""
        ckpt = self.ckpt
        writes = (ckpt.saves or self.keeps_best) and (ckpt.save_hf or not ckpt.disable_ds)
        return set() if writes or ckpt.load_enable else {"ckpt.path"}

    def notices(self) -> Sentences:
        """Checkpoints that hold nothing."""
        return [*super().notices(), *combined(self, "noticed", "training")]

    def mistakes(self) -> Sentences:
        """Adapters, precision and offload go together; patience has evaluations, a metric and a
        checkpoint to wait for.
        """
        return [*super().mistakes(), *combined(self, "refused", "training")]
