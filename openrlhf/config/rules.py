"""Rules, notices and derived values that several kinds of commands share.

A rule is a function that yields a sentence for each violation. In a sentence, `<train.seed>` stands
for the flag as it is typed: --train.seed 42. Rules of one command are in its own module; those of
training are in `training_rules`, those of rewards and engines in `sampling_rules`.
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
from openrlhf.config.flags import Flag, flags_in, flags_of, items, value_at
from openrlhf.config.shared import LoadingConfig

FILE_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
ATTENTIONS = ("flash_attention_2", "flash_attention_3", "flex_attention", "sdpa", "eager")
PROBABILITY_SLACK = 2e-3  # 0.333,0.333,0.333 is meant as thirds


def attention_in_effect(ds: LoadingConfig, given: Mapping[str, Any]) -> str:
    """Return the attention that can run here.

    The default is FlashAttention 2 if CUDA and the package exist, else SDPA. Another choice is kept
    if it can run.
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
        return wanted  # a rule judges it
    return "sdpa"


def mixes_samples(attention: str) -> bool:
    """Return whether this attention sees all of a packed row as one sample."""
    return "flash" not in attention and attention != "sdpa"


def loading_notices(ds: LoadingConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield notices about an attention that was replaced, and a data type that is slow here."""
    asked = given.get("ds.attn_implementation")
    if asked and asked != ds.attn_implementation:
        if ds.packing_samples and mixes_samples(asked):
            why = "it mixes the samples that --ds.packing_samples concatenates"
        elif machine.count_gpus() == 0:
            why = "there is no GPU"
        else:
            why = "the package flash-attn is not installed"
        yield f"<ds.attn_implementation> instead of {asked}: {why}."
    if ds.param_dtype != "fp32" and not machine.has_quick_bfloat16():
        yield (
            "<ds.param_dtype> takes 5 to 20 times as long as --ds.param_dtype fp32: this CPU has "
            "no AVX-512."
        )


def loading_violations(ds: LoadingConfig) -> Iterator[str]:
    """Yield what is wrong with attention and data type."""
    attention = ds.attn_implementation
    if "/" not in attention and attention not in ATTENTIONS:
        yield (
            f"<ds.attn_implementation> is unknown: use {', '.join(ATTENTIONS)}, or OWNER/KERNEL "
            "of the hub."
        )
    if ds.load_in_4bit and ds.param_dtype != "bf16":
        yield (
            "<ds.param_dtype> cannot be combined with --ds.load_in_4bit, which computes in bf16."
        )
    if ds.param_dtype == "fp32" and "flash_attention" in attention:
        yield ("<ds.param_dtype> needs --ds.attn_implementation sdpa: FlashAttention has no fp32.")


def machine_values(config: Any) -> dict[str, Any]:
    """Return what follows from the devices, by path.

    There is a host process for each core. Without GPUs, each role has one process.
    """
    values = {"reward.workers": config.reward.workers or machine.usable_cores()}
    if not machine.count_gpus():
        values |= dict.fromkeys(_sizes_not_given(config), 1)
    return values


def single_process_notices(config: Any) -> Iterator[str]:
    """Yield a notice that names the roles with one process because there is no GPU."""
    if machine.count_gpus():
        return
    unused = unused_flags(config)
    single: list[str] = []
    for path in _sizes_not_given(config):
        if value_at(config, path) == 1 and path not in unused:
            single.append(f"--{path}")
    if single:
        yield f"There is no GPU, so the default is 1 for {', '.join(single)}."


def _sizes_not_given(config: Any) -> list[str]:
    sizes = [path for path in flags_of(config.__class__) if path.endswith(".num_gpus_per_node")]
    return [path for path in sizes if path not in config.given]


def sources_exist(config: Any) -> Iterator[str]:
    """Yield what is wrong with models and datasets that can only be local.

    Dataset scripts are refused.
    """
    for flag, value in flags_in(config):
        if flag.holds == "model":
            for path in items(value):
                yield from _model_exists(flag, path)
        elif flag.holds == "dataset":
            for name in items(value):
                yield from _dataset_exists(flag, name.partition("@")[0])


def _model_exists(flag: Flag, path: str) -> Iterator[str]:
    if os.path.isfile(f"{path}/adapter_config.json"):
        yield (
            f"{flag.name} {path} is an adapter: merge it with its base first: openrlhf "
            "lora_combiner."
        )
    if _is_gone(path):
        yield f"{flag.name} {path} does not exist on this machine, or this user may not read it."


def _dataset_exists(flag: Flag, path: str) -> Iterator[str]:
    if path.endswith(".py"):
        yield (
            f"{flag.name} {path} is a Python script, which the datasets library no longer runs. "
            "Convert the data to parquet or jsonl and give that."
        )
    elif _is_gone(path):
        yield f"{flag.name} {path} does not exist on this machine, or this user may not read it."


def _is_gone(path: str) -> bool:
    is_local = looks_local(path) or os.path.exists(path)
    return is_local and not os.access(path, os.R_OK)


def looks_local(path: str) -> bool:
    """Return whether a text can only be a path: hub names are `name` or `owner/name`."""
    if "://" in path:
        return False
    begins = path.startswith(("/", "./", "../", "~"))
    return begins or path.count("/") > 1 or path.endswith(FILE_ENDINGS)


def has_host(url: str) -> bool:
    """Return whether a text is an http(s) URL of some host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


def is_url(text: str) -> bool:
    """Return whether a text begins as an http(s) URL."""
    return text.startswith(("http://", "https://"))


def is_file(text: str | None) -> TypeGuard[str]:
    """Return whether a text, which may be long, is the path of a file here."""
    return text is not None and os.path.isfile(text)


def is_number(text: str) -> bool:
    """Return whether a text can be read as a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def room(config: Any) -> int:
    """Return the tokens of --data.max_len, or the positions of the model if these are fewer.

    Only the positions of a model in a folder of this machine are known.
    """
    file = Path(config.model.model_name_or_path or os.devnull, "config.json")
    try:
        stored = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return config.data.max_len
    return min(config.data.max_len, stored.get("max_position_embeddings") or config.data.max_len)


def probability_violations(config: Any, datasets: str, probs: str) -> Iterator[str]:
    """Yield what is wrong with the probabilities of datasets; both are paths of flags.

    Each dataset has one probability, and they sum to 1.
    """
    count, texts = len(items(value_at(config, datasets))), items(value_at(config, probs))
    if not texts:
        return
    if not all(is_number(text) for text in texts):
        yield f"--{probs} takes numbers separated by commas, not {','.join(texts)!r}."
        return
    numbers = [float(text) for text in texts]
    if len(numbers) != count:
        yield f"--{probs} has {len(numbers)} numbers, but --{datasets} {count} datasets: one each."
    elif min(numbers) <= 0 or abs(sum(numbers) - 1) >= PROBABILITY_SLACK:
        yield f"<{probs}> must be positive and sum to 1."
