"""Rules, notices and derived values that several kinds of commands share.

A rule is a function that yields a sentence for each violation. In a sentence, `<train.seed>` is
replaced by the flag and its value: --train.seed 42. Rules for a single command are in its own
module, rules for training in `training_rules`, and rules for rewards and engines in
`sampling_rules`.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from openrlhf.config import machine
from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import Flag, dataset_parts, flags_in, flags_of, items, value_at
from openrlhf.config.shared import DeepSpeedConfig, LoadingConfig

FILE_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
ATTENTIONS = ("flash_attention_2", "flash_attention_3", "flex_attention", "sdpa", "eager")
PROBABILITY_SLACK = 2e-3  # allows 0.333,0.333,0.333 for thirds


def attention_in_effect(ds: LoadingConfig, given: Mapping[str, Any]) -> str:
    """Return the attention implementation to use on this machine.

    The default is FlashAttention 2 if a GPU and the flash-attn package are available, otherwise
    SDPA. Any other choice is kept if it can run.
    """
    packed = ds.packing_samples and mixes_samples(ds.attn_implementation)
    wanted = "flash_attention_2" if packed else ds.attn_implementation
    if "flash_attention" not in wanted:
        return wanted
    if machine.has_flash_attention() and ds.param_dtype != "fp32":
        return wanted
    named = "ds.attn_implementation" in given and machine.count_gpus() > 0
    falls_back = wanted == "flash_attention_2" and not machine.has_flash_attention()
    if named and not packed and not falls_back:
        return wanted  # checked by a rule
    return "sdpa"


def mixes_samples(attention: str) -> bool:
    """Return whether this attention treats a packed row as a single sample."""
    return "flash" not in attention and attention != "sdpa"


def loading_notices(ds: LoadingConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield notices about a replaced attention implementation and a slow data type."""
    asked = given.get("ds.attn_implementation")
    if asked and asked != ds.attn_implementation:
        if isinstance(ds, DeepSpeedConfig) and ds.ring_attn_size > 1:
            why = f"--ds.ring_attn_size {ds.ring_attn_size} uses its own attention"
        elif ds.packing_samples and mixes_samples(asked):
            why = "it would mix the samples that --ds.packing_samples concatenates"
        elif machine.count_gpus() == 0:
            why = "there is no GPU"
        else:
            why = "the package flash-attn is not installed"
        yield f"Using <ds.attn_implementation> instead of {asked}: {why}."
    if ds.param_dtype != "fp32" and not machine.has_quick_bfloat16():
        yield (
            "<ds.param_dtype> is 5 to 20 times slower than --ds.param_dtype fp32: this CPU has no "
            "AVX-512."
        )


def loading_violations(ds: LoadingConfig) -> Iterator[str]:
    """Yield violations of the rules for attention and data type."""
    attention = ds.attn_implementation
    if "/" not in attention and attention not in ATTENTIONS:
        yield (
            f"<ds.attn_implementation> is unknown: use {', '.join(ATTENTIONS)}, or OWNER/KERNEL "
            "from the Hub."
        )
    if ds.load_in_4bit and ds.param_dtype != "bf16":
        yield (
            "<ds.param_dtype> cannot be combined with --ds.load_in_4bit, which computes in bf16."
        )
    if ds.param_dtype == "fp32" and "flash_attention" in attention:
        yield (
            "<ds.param_dtype> needs --ds.attn_implementation sdpa: FlashAttention does not "
            "support fp32."
        )


def machine_values(config: Any) -> dict[str, Any]:
    """Return the values that depend on this machine's devices, keyed by flag path.

    By default, there is one process for reward code per core. Without GPUs, each role gets one
    process, or as many processes as share a sequence and a layer.
    """
    values = {"reward.workers": config.reward.workers or machine.usable_cores()}
    if not machine.count_gpus():
        for path in _sizes_not_given(config):
            values[path] = config.ds.ranks_per_slice
    return values


def single_process_notices(config: Any) -> Iterator[str]:
    """Yield a notice that lists the sizes set to 1 because there is no GPU."""
    if machine.count_gpus():
        return
    unused = unused_flags(config)
    size = config.ds.ranks_per_slice
    smallest: list[str] = []
    for path in _sizes_not_given(config):
        if value_at(config, path) == size and path not in unused:
            smallest.append(f"--{path}")
    if smallest:
        yield f"There is no GPU, so the default is {size} for {', '.join(smallest)}."


def _sizes_not_given(config: Any) -> list[str]:
    missing = [path for path in flags_of(config.__class__) if path not in config.given]
    return [path for path in missing if path.endswith(".num_gpus_per_node")]


def sources_exist(config: Any) -> Iterator[str]:
    """Yield a violation for each model or dataset that must be a local path but is not usable.

    Dataset scripts are refused.
    """
    for flag, path in sources(config):
        if flag.holds == "model" and os.path.isfile(f"{path}/adapter_config.json"):
            yield (
                f"{flag.name} {path} is an adapter: first merge it into its base model with "
                "openrlhf lora_combiner."
            )
        if flag.holds == "dataset" and path.endswith(".py"):
            yield (
                f"{flag.name} {path} is a Python script, which the datasets library no longer "
                "runs. Convert the data to parquet or jsonl and pass that file."
            )
        elif _is_gone(path):
            yield (
                f"{flag.name} {path} does not exist on this machine or is not readable by this "
                "user."
            )


def hub_notices(config: Any) -> Iterator[str]:
    """Yield a notice for each model from the Hub whose name may be meant as a local folder."""
    for flag, path in sources(config):
        owner = os.path.dirname(path)
        is_missing = os.path.isdir(owner) and not os.path.exists(path)
        is_hub_model = flag.holds == "model" and is_missing and not _is_gone(path)
        if is_hub_model and os.access(owner, os.R_OK):
            folders = sorted(entry.name for entry in os.scandir(owner) if entry.is_dir())
            found = ", ".join(folders) or "no folder"
            yield (
                f"{flag.name} {path} is loaded from the Hub, because the folder does not exist "
                f"({owner} has {found:.200})."
            )


def sources(config: Any) -> Iterator[tuple[Flag, str]]:
    """Yield the path or Hub name of each model and dataset, with its flag."""
    for flag, value in flags_in(config):
        if flag.holds not in ("model", "dataset"):
            continue
        for name in items(value):
            path = name
            if flag.holds == "dataset":
                path, _ = dataset_parts(name)
            yield flag, path


def _is_gone(path: str) -> bool:
    is_local = looks_local(path) or os.path.exists(path)
    return is_local and not os.access(path, os.R_OK)


def looks_local(path: str) -> bool:
    """Return whether a text can only be a path. Hub names are `name` or `owner/name`."""
    if "://" in path:
        return False
    begins = path.startswith(("/", "./", "../", "~"))
    return begins or path.count("/") > 1 or path.endswith(FILE_ENDINGS)


def has_host(url: str) -> bool:
    """Return whether a text is an http(s) URL with a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


def is_file(text: str | None) -> TypeGuard[str]:
    """Return whether a text, which may be very long, is the path of an existing file."""
    return text is not None and os.path.isfile(text)


def is_number(text: str) -> bool:
    """Return whether a text can be read as a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def room(config: Any) -> int:
    """Return --data.max_len, or the model's context length if that is shorter, in tokens.

    The context length is known only for a model in a local folder.
    """
    file = Path(config.model.model_name_or_path or os.devnull, "config.json")
    try:
        stored = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return config.data.max_len
    return min(config.data.max_len, stored.get("max_position_embeddings") or config.data.max_len)


def probability_violations(config: Any, datasets: str, probs: str) -> Iterator[str]:
    """Yield violations of the rules for dataset probabilities.

    Each dataset needs one probability, and the probabilities must sum to 1. `datasets` and `probs`
    are the paths of the flags.
    """
    count = len(items(value_at(config, datasets)))
    texts = items(value_at(config, probs))
    numbers = [float(text) for text in texts if is_number(text)]
    if texts and not (
        len(numbers) == len(texts) == count
        and min(numbers) > 0
        and abs(sum(numbers) - 1) < PROBABILITY_SLACK
    ):
        yield (
            f"<{probs}> must be {count} positive number(s) that sum to 1, one per dataset of "
            f"--{datasets}, separated by commas."
        )
