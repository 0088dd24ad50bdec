"""Root of `lora_combiner`: an adapter, its base, and where the merged model goes."""

from __future__ import annotations

from pathlib import Path

from openrlhf.config import shared
from openrlhf.config.commands import Command
from openrlhf.config.effects import Sentences
from openrlhf.config.flags import Section, option, required


# fmt: off
class MergedConfig(Section):
    """The merged model."""
    param_dtype: str = option("bf16", "Data type of the stored weights.", choices=shared.DTYPES)


class CombinerConfig(Command):
    """Merge an adapter into its base model."""
    model_path: str = required("Folder or hub name of the base model.", holds="model")
    lora_path: str = required("Folder of the adapter.")
    output_path: str = required("Folder of the merged model.")
    is_rm: bool = option(False, "The adapter is a reward model's or critic's.")
    ds: MergedConfig = MergedConfig()

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        there = (Path(self.lora_path or "").expanduser() / "adapter_config.json").is_file()
        return [
            *super().mistakes(),
            (self.lora_path and not there, "<lora_path> is no folder with an adapter: it has no adapter_config.json."),
        ]
