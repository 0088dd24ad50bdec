"""Root of `pipeline`, and the commands that its stages may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from openrlhf.config.commands import Command
from openrlhf.config.effects import Effects, Sentences
from openrlhf.config.flags import Section, derived, option, required

# By verb: the command, the module and the name of its root, and what later stages use of its folder.
STAGES = {
    "sft": ("train_sft", "supervised", "SFTConfig", "model"),
    "rm": ("train_rm", "supervised", "RMConfig", "model"),
    "dpo": ("train_dpo", "supervised", "DPOConfig", "model"),
    "kto": ("train_kto", "supervised", "KTOConfig", "model"),
    "prm": ("train_prm", "supervised", "PRMConfig", "model"),
    "kd": ("train_kd", "supervised", "KDConfig", "model"),
    "ppo": ("train_ppo_ray", "ppo", "PPOConfig", "model"),
    "eval": ("eval", "evaluation", "EvaluationConfig", "."),
    "batch_inference": ("batch_inference", "inference", "BatchInferenceConfig", "answers.jsonl"),
    "lora_combiner": ("lora_combiner", "combining", "CombinerConfig", "model"),
}


# fmt: off
class PipelineRunConfig(Section):
    """Where everything goes."""
    dir: str = derived("Folder of all stages; unset: ./runs/<name of the file>, and its settings if not the first.")

class PipelineConfig(Command):
    """Stages in a file, one after the other."""
    effects: ClassVar[Effects] = {"!always": ["plugin"]}

    file: str = required("YAML file with the stages; may also be the first word.", metavar="FILE.yaml")
    settings: str = option("", "Which settings of the file; unset: its first.")
    dry_run: bool = option(False, "Check everything, say what would run, stop.", saved=False)
    run: PipelineRunConfig = PipelineRunConfig()

    def derived_values(self) -> dict[str, Any]:
        """The folder."""
        name = "-".join([Path(self.file or "").stem, *filter(None, [self.settings])])
        return {"run.dir": self.run.dir or f"./runs/{name}"}

    def mistakes(self) -> Sentences:
        """The file is there."""
        return [*super().mistakes(), (self.file and not Path(self.file).is_file(), "<file> is no file on this machine.")]
