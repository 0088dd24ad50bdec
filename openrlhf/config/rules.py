"""Rules and notices that commands share, about sections of flags.

A notice or a rule is a row: whether it holds, and a sentence. In the sentence `<train.seed>` stands
for the flag as it is typed: --train.seed 42.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from openrlhf.config import machine
from openrlhf.config.effects import Given, Sentences, combined, unmet
from openrlhf.config.flags import flags_in, flags_of, items, value_at
from openrlhf.config.rollout import RemoteEnginesConfig, RewardConfig, RuleConfig
from openrlhf.config.shared import LoadingConfig

FILE_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
ATTENTIONS = ("flash_attention_2", "flash_attention_3", "flex_attention", "sdpa", "eager")
PROBABILITY_SLACK = 2e-3  # 0.333,0.333,0.333 is meant as thirds


def attention_in_effect(ds: LoadingConfig, given: Given) -> str:
    """FlashAttention 2 where CUDA and the package are there, SDPA elsewhere; another choice as it
    is where it can run.
    """
    packed = ds.packing_samples and mixes_samples(ds.attn_implementation)
    wanted = "flash_attention_2" if packed else ds.attn_implementation
    if "flash_attention" not in wanted or (
        machine.has_flash_attention() and ds.param_dtype != "fp32"
    ):
        return wanted
    named = "ds.attn_implementation" in given and machine.count_gpus() > 0  # a rule judges it
    falls_back = wanted == "flash_attention_2" and not machine.has_flash_attention()
    return wanted if named and not packed and not falls_back else "sdpa"


def mixes_samples(attention: str) -> bool:
    """Whether this attention sees all of a packed row as one sample."""
    return "flash" not in attention and attention != "sdpa"


# fmt: off
def loading_notices(ds: LoadingConfig, given: Given) -> Sentences:
    """Another attention than the one that was asked for, and a data type that is slow here."""
    asked = given.get("ds.attn_implementation")
    why = "there is no GPU" if machine.count_gpus() == 0 else "the package flash-attn is not installed"
    if ds.packing_samples and mixes_samples(str(asked)):
        why = "it mixes the samples that --ds.packing_samples concatenates"
    return [
        (asked and asked != ds.attn_implementation, f"<ds.attn_implementation> instead of {asked}: {why}."),
        (ds.param_dtype != "fp32" and not machine.has_quick_bfloat16(),
         "<ds.param_dtype> takes 5 to 20 times as long as --ds.param_dtype fp32: this CPU has no AVX-512."),
    ]


def machine_values(config: Any) -> dict[str, Any]:
    """What follows from the devices: a host process for each core; without GPUs, one process for
    each role.
    """
    sizes = _sizes_not_given(config) if not machine.count_gpus() else []
    return {**dict.fromkeys(sizes, 1), "reward.workers": config.reward.workers or machine.usable_cores()}


def single_process_notices(config: Any) -> Sentences:
    """Which roles have one process because there is no GPU."""
    alone = [path for path in _sizes_not_given(config) if value_at(config, path) == 1]
    used = [f"--{path}" for path in alone if not unmet(config, flags_of(config.__class__)[path])]
    return [(used and not machine.count_gpus(), f"There is no GPU: {', '.join(used)} is 1.")]


def _sizes_not_given(config: Any) -> list[str]:
    sizes = [path for path in flags_of(config.__class__) if path.endswith(".num_gpus_per_node")]
    return [path for path in sizes if path not in config.given]


def sources_exist(config: Any) -> Sentences:
    """Models and datasets that can only be local are there; dataset scripts are refused."""
    rows: Sentences = []
    for flag, value in flags_in(config):
        for item in items(value) if flag.holds in ("model", "dataset") else []:
            path = item.partition("@")[0] if flag.holds == "dataset" else item
            script = flag.holds == "dataset" and path.endswith(".py")
            gone = (looks_local(path) or os.path.exists(path)) and not os.access(path, os.R_OK)
            rows += [
                (flag.holds == "model" and os.path.isfile(f"{path}/adapter_config.json"),
                 f"{flag.name} {path} is an adapter: merge it with its base first: openrlhf lora_combiner."),
                (gone and not script, f"{flag.name} {path} does not exist on this machine, or this user may not read it."),
                (script, f"{flag.name} {path} is a Python script, which the datasets library no "
                 "longer runs. Convert the data to parquet or jsonl and give that."),
            ]
    return rows


def rule_mistakes(config: Any) -> Sentences:
    """URLs, or one Python file that is there; a verifier has labels."""
    reward: RuleConfig = config.reward
    file = reward.function_path
    wrong = [url for url in reward.urls if not url.startswith(("http://", "https://"))]
    return [
        *combined(config, "refused", "rewards"),
        (wrong, f"--reward.remote_url {','.join(wrong)} is neither an http(s) URL nor a .py file."),
        (file and len(reward.sources) > 1, "<reward.remote_url> mixes a .py file with others: give one."),
        (file and not is_file(file), f"--reward.remote_url {file} does not exist on this machine."),
    ]


def reward_mistakes(config: Any) -> Sentences:
    """What scores the samples: models, URLs, one Python file that is there, an agent."""
    reward, agent = config.reward, config.train.agent_func_path
    return [
        *rule_mistakes(config),
        (agent and not (agent.endswith(".py") and is_file(agent)),
         "<train.agent_func_path> is not a .py file on this machine."),
        *sum_mistakes(reward, len(reward.models) + bool(reward.remote_url or reward.verifier or agent)),
    ]


def remote_engine_mistakes(rollout: RemoteEnginesConfig) -> Sentences:
    """Each remote engine has a name of its own, and a URL with a host."""
    names = [name for name, _ in rollout.named_engines]
    wrong = [url for _, url in rollout.named_engines if not has_host(url)]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [
        (wrong, f"--rollout.remote_engines {' '.join(wrong)} is no http(s) URL: write NAME=http://host:port/v1."),
        (twice, f"<rollout.remote_engines> has the name {', '.join(twice)} twice: give each its own."),
    ]


def has_host(url: str) -> bool:
    """Whether a text is an http(s) URL of some host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


def sum_mistakes(reward: RewardConfig, parts: int) -> Sentences:
    """Each of so many rewards has one weight, and failed ones a policy."""
    return [
        (reward.weights and len(reward.weights) != parts,
         f"<reward.weights> has {len(reward.weights or ())} numbers for {parts} rewards: one for each of "
         "--reward.model_name_or_path, then one for --reward.remote_url or --reward.verifier."),
        (reward.on_error not in ("fail", "drop") and not is_number(reward.on_error),
         f"--reward.on_error takes fail, drop or a number, not {reward.on_error!r}."),
    ]


def is_file(text: str | None) -> TypeGuard[str]:
    """Whether a text, which may be long, is the path of a file here."""
    return text is not None and os.path.isfile(text)


def room(config: Any) -> int:
    """The tokens of --data.max_len, or the positions of the model, if it is a folder here and they
    are fewer.
    """
    try:
        stored = json.loads(Path(config.model.model_name_or_path or os.devnull, "config.json").read_bytes())
    except (OSError, ValueError):
        stored = dict[str, Any]()
    return min(config.data.max_len, stored.get("max_position_embeddings") or config.data.max_len)


def looks_local(path: str) -> bool:
    """Whether a text can only be a path: hub names are `name` or `owner/name`."""
    begins = path.startswith(("/", "./", "../", "~"))
    return "://" not in path and (begins or path.count("/") > 1 or path.endswith(FILE_ENDINGS))


def held_out_notices(config: Any, dataset: str, split: str) -> Sentences:
    """Return a notice if the evaluation dataset is the training dataset, whose flags have these
    paths.
    """
    evaluation, trained = config.eval, value_at(config, dataset)
    same_split = is_file(trained) or evaluation.split == value_at(config, split)  # a file has a single split
    return [
        (evaluation.dataset and evaluation.dataset == trained and same_split,
         f"<eval.dataset> is the training data (--{dataset}), so the evaluation does not show whether the model "
         "generalizes. Name rows that are not trained on."),
    ]


def probabilities_fit(config: Any, datasets: str, probs: str) -> Sentences:
    """Each dataset has one probability, and they sum to 1; for the paths of two flags."""
    count, texts = len(items(value_at(config, datasets))), items(value_at(config, probs))
    numbers = [float(text) for text in texts if is_number(text)]
    readable = len(numbers) == len(texts)
    unit = min(numbers, default=1) > 0 and abs(sum(numbers) - 1) < PROBABILITY_SLACK
    return [
        (not readable, f"--{probs} takes numbers separated by commas, not {','.join(texts)!r}."),
        (numbers and readable and len(numbers) != count,
         f"--{probs} has {len(numbers)} numbers, but --{datasets} {count} datasets: one each."),
        (numbers and readable and len(numbers) == count and not unit, f"<{probs}> must be positive and sum to 1."),
    ]


def is_number(text: str) -> bool:
    """Whether a text can be read as a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def batch_fits_ranks(batch_size: int, ranks: int, *, micro: int, what: str) -> Sentences:
    """The batch is whole micro-batches on each rank; `what` says where `ranks` comes from."""
    each, rest = divmod(batch_size, ranks)
    return [
        (rest, f"<train.batch_size> does not divide by {ranks} data-parallel ranks "
         f"({what}): use {max(1, each) * ranks} or {(each + 1) * ranks}."),
        (not rest and each % max(1, micro), f"<train.batch_size> gives each of {ranks} "
         f"rank(s) ({what}) {each} samples, which do not divide by --train.micro_batch_size "
         f"{micro}."),
    ]
