"""Settings that tests use to load a model."""

from pathlib import Path
from typing import Any

from openrlhf.config.shared import LoadingConfig
from openrlhf.models.loading import LoadSpec


def load_spec(
    path: Path | str,
    *,
    param_dtype: str = "fp32",
    attention: str = "sdpa",
    packing: bool = False,
    load_in_4bit: bool = False,
    **more: Any,
) -> LoadSpec:
    """Return the settings for loading the model in a folder."""
    ds = LoadingConfig(
        param_dtype=param_dtype,
        attn_implementation=attention,
        packing_samples=packing,
        load_in_4bit=load_in_4bit,
    )
    return LoadSpec(path=str(path), ds=ds, **more)
