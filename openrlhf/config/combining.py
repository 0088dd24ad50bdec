"""Configuration of `lora_combiner`: the adapter, its base model and the output folder."""

from __future__ import annotations

from openrlhf.config import shared
from openrlhf.config.commands import Command
from openrlhf.config.flags import Section, option, required, switch


class MergedConfig(Section):
    """The merged model."""

    param_dtype: str = option("bf16", "Data type of the saved weights.", choices=shared.DTYPES)


class CombinerConfig(Command):
    """Merge an adapter into its base model."""

    model_path: str = required("Folder or Hub name of the base model.", holds="model")
    lora_path: str = required("Folder of the adapter.", holds="place")
    output_path: str = required(
        "Output folder for the merged model.", holds="place", writes="model"
    )
    is_rm: bool = switch("The adapter belongs to a reward model or a critic.")
    ds: MergedConfig = MergedConfig()
