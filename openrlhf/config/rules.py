"""Derived values, notices and rules that commands share.

A notice or a rule is a row: whether it holds, and a sentence in which `<train.seed>` stands for
the flag as it is typed: --train.seed 42.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from openrlhf.config import machine
from openrlhf.config.flags import amend, bound_violations, flags_in, spelled_out, value_at
from openrlhf.config.unsupported import refusals

if TYPE_CHECKING:
    from openrlhf.config.rollout import RemoteEnginesConfig, RewardConfig, RolloutConfig, RuleConfig
    from openrlhf.config.shared import Command, LoadingConfig, OptimizerConfig, RecordedCommand, Root

Given = frozenset[str]  # the paths the user gave, by flag or file
Replaced = Mapping[str, Any]  # by path: values the user gave, or defaults, that are others now
Sentences = list[tuple[object, str]]
FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
R = TypeVar("R", bound="Command")


def resolved(config: R, given: Given, command: str) -> tuple[R, list[str]]:
    """A copy with all derived values, and the notices that hold for it."""
    values = config.derived_values(given)
    values |= amend(config, values).common_values(given, command)
    copy = amend(config, values)
    replaced = {path: old for path in values if (old := value_at(config, path)) != values[path]}
    return copy, spelled_out(copy, copy.notices(replaced, given))


def violations(config: Command) -> list[str]:
    """All that is wrong with a resolved configuration."""
    found = [*bound_violations(config), *refusals(config)]
    return [*found, *spelled_out(config, config.mistakes())]


def run_values(config: RecordedCommand, command: str) -> dict[str, Any]:
    """What follows in every command with a run folder, by path."""
    template = config.data.input_template
    name = config.run_name_prefix + time.strftime("%m%dT%H:%M")
    return {
        "run.dir": config.run.dir or f"./runs/{command}-{time.strftime('%Y%m%d-%H%M%S')}",
        "logger.wandb.run_name": config.logger.wandb.run_name or name,
        "data.input_template": template if "{}" in (template or "") else None,
    }


def attention_in_effect(ds: LoadingConfig, given: Given) -> str:
    """FlashAttention 2 where CUDA and the package are there, SDPA elsewhere."""
    packed = ds.packing_samples and mixes_samples(ds.attn_implementation)
    wanted = "flash_attention_2" if packed else ds.attn_implementation
    runs_here = machine.has_flash_attention() and ds.param_dtype != "fp32"
    refused = "ds.attn_implementation" in given and machine.count_gpus() > 0  # by a rule
    return wanted if "flash_attention" not in wanted or runs_here or refused else "sdpa"


def mixes_samples(attention: str) -> bool:
    """Whether this attention sees all of a packed row as one sample."""
    return "flash" not in attention and attention != "sdpa"


# fmt: off
def attention_notices(ds: LoadingConfig, replaced: Replaced, given: Given) -> Sentences:
    """What another attention than the one asked for has to be told about."""
    attention = replaced.get("ds.attn_implementation")
    packed = attention and ds.packing_samples and mixes_samples(attention)
    chosen = attention and not packed and "ds.attn_implementation" in given
    return [
        (packed, f"--ds.packing_samples does not work with --ds.attn_implementation {attention}: "
         "<ds.attn_implementation> is used."),
        (chosen, f"No GPU on this machine: sdpa instead of --ds.attn_implementation {attention}."),
    ]


def template_notices(config: RecordedCommand, replaced: Replaced) -> Sentences:
    """Templates that are not what they seem to be."""
    template = replaced.get("data.input_template")
    return [
        (template is not None,
         f"--data.input_template {template!r} has no {{}} for the prompt and is not used."),
        ("\\n" in (config.data.input_template or ""), "--data.input_template has a backslash and "
         "an n, not a line break; in bash a line break is written $'\\n'."),
    ]


def run_notices(config: Root, given: Given) -> Sentences:
    """What the user of any training command may have to know."""
    ckpt, no_data = config.ckpt, not config.eval.dataset
    return [
        (no_data and config.eval.steps >= 0 and config.evaluates_given_data_only, "--eval.steps has no effect without --eval.dataset."),
        ("ckpt.best_metric_key" in given and no_data and config.evaluates_given_data_only and ckpt.best_metric_key != "none",
         "--ckpt.best_metric_key has no effect without --eval.dataset."),
        (config.ds.overlap_comm and config.ds.zero_stage < 2,
         "--ds.overlap_comm has no effect below --ds.zero_stage 2."),
        (ckpt.save_steps >= 0 and ckpt.disable_ds and not ckpt.save_hf,
         "--ckpt.save_steps saves nothing: --ckpt.disable_ds is on and --ckpt.save_hf off."),
    ]


def muon_notices(prefix: str, optimizer: OptimizerConfig) -> Sentences:
    """What Muon ignores or applies differently."""
    muon, decay = optimizer.muon, optimizer.adam.weight_decay
    rows: Sentences = [
        (muon.ns_steps != 5, f"With Muon --{prefix}muon.ns_steps is ignored."),
        (not muon.nesterov, f"With Muon --{prefix}muon.no_nesterov is ignored."),
        (optimizer.max_norm, f"With Muon --{prefix}max_norm clips after orthogonalisation."),
        (decay, f"With Muon --{prefix}adam.weight_decay applies to every weight."),
    ]
    return rows if optimizer.optim == "muon" else []


def balance_reaches_routers(section: str, model: Any) -> Sentences:
    """A load-balancing loss has a gradient; `model` is the section of that name."""
    reentrant = model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant
    return [(reentrant and model.aux_loss_coef > 0, f"<{section}.aux_loss_coef> would not reach the routers: they run "
             f"without a graph under --{section}.gradient_checkpointing_reentrant. Leave that out.")]


def items(text: str | None) -> list[str]:
    """The parts of a comma list, without blanks."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def sources_exist(config: Any) -> Sentences:
    """Models and datasets that can only be local are there; dataset scripts are refused."""
    rows: Sentences = []
    for flag, value in flags_in(config):
        for item in items(value) if flag.holds else []:
            path = item.partition("@")[0] if flag.holds == "dataset" else item
            script = flag.holds == "dataset" and path.endswith(".py")
            gone = looks_local(path) and not Path(path).expanduser().exists()
            rows += [
                (gone and not script, f"{flag.name} {path} does not exist on this machine."),
                (script, f"{flag.name} {path} is a Python script, which the datasets library no "
                 "longer runs. Convert the data to parquet or jsonl and give that."),
            ]
    return rows


def rule_mistakes(reward: RuleConfig, label_key: str | None) -> Sentences:
    """URLs, or one Python file that is there; a verifier has labels."""
    file, verifier = reward.function_path, reward.verifier
    wrong = [url for url in reward.urls if not url.startswith(("http://", "https://"))]
    return [
        (wrong, f"--reward.remote_url {','.join(wrong)} is neither an http(s) URL nor a .py file."),
        (file and len(reward.sources) > 1,
         "<reward.remote_url> mixes a .py file with others: give one."),
        (file and not Path(file).expanduser().is_file(),
         f"--reward.remote_url {file} does not exist on this machine."),
        (verifier not in (None, "format") and not label_key,
         "<reward.verifier> checks responses against labels: name their column with --data.label_key."),
    ]


def agent_mistakes(path: str | None, reward: RewardConfig) -> Sentences:
    """An agent's file is there, and its failed episodes get no number."""
    here = not path or (path.endswith(".py") and Path(path).expanduser().is_file())
    return [
        (not here, "<train.agent_func_path> is not a .py file on this machine."),
        (path and is_number(reward.on_error),
         "<reward.on_error> cannot reward an episode that an agent did not finish: use fail or drop."),
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


def remote_engine_notices(rollout: RolloutConfig, *, used: object) -> Sentences:
    """Something can ask the remote engines."""
    return [(rollout.remote_engines and not used, "--rollout.remote_engines has no effect: agents (--train.agent_func_path), "
             "reward functions (--reward.remote_url FILE.py) and --algo.distill.teacher use them.")]


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


def looks_local(path: str) -> bool:
    """Whether a text can only be a path: hub names are `name` or `owner/name`."""
    begins = path.startswith(("/", "./", "../", "~"))
    return "://" not in path and (begins or path.count("/") > 1 or path.endswith(FILE_ENDINGS))


def attention_can_run(ds: LoadingConfig) -> Sentences:
    """Attention and data type are there, and go together."""
    fp16, fp32 = ds.param_dtype == "fp16", ds.param_dtype == "fp32"
    return [
        (ds.attn_implementation == "flash_attention_2" and not machine.has_flash_attention(),
         "<ds.attn_implementation> needs the package flash-attn: install it, or use sdpa."),
        (fp32 and "flash_attention" in ds.attn_implementation,
         "<ds.param_dtype> needs --ds.attn_implementation sdpa: FlashAttention has no fp32."),
        (fp16 and ds.load_in_4bit,
         "--ds.load_in_4bit computes in bf16: use --ds.param_dtype bf16 instead of fp16."),
    ]


def patience_can_end(config: Root) -> Sentences:
    """There are evaluations to wait for, a metric to judge them by, and a checkpoint that keeps the best weights."""
    patience, ckpt = config.eval.patience, config.ckpt
    return [
        (patience and not config.eval.dataset, "<eval.patience> waits for a better evaluation: give --eval.dataset."),
        (patience and ckpt.best_metric_key == "none",
         "<eval.patience> waits for a better --ckpt.best_metric_key, which is none: name a metric, or leave it out."),
        (patience and ckpt.disable_ds, "<eval.patience> exports the best weights from their checkpoint, which "
         "--ckpt.disable_ds does not write: leave one of them out."),
    ]


def probabilities_fit(config: Root, datasets: str, probs: str) -> Sentences:
    """Each dataset has one probability, and they sum to 1; for the paths of two flags."""
    count, texts = len(items(value_at(config, datasets))), items(value_at(config, probs))
    shares = [float(text) for text in texts if is_number(text)]
    unit = min(shares, default=0) >= 0 and abs(sum(shares) - 1) < 1e-6
    return [
        (len(shares) < len(texts), f"--{probs} takes numbers separated by commas, not "
         f"{','.join(texts)!r}."),
        (shares and len(shares) == len(texts) != count,
         f"--{probs} has {len(shares)} numbers, but --{datasets} {count} datasets: one each."),
        (shares and len(shares) == len(texts) == count and not unit,
         f"<{probs}> must be positive and sum to 1."),
    ]


def is_number(text: str) -> bool:
    """Whether a text can be read as a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def batch_fits_ranks(config: Root, ranks: int, *, micro: int, what: str) -> Sentences:
    """The batch is whole micro-batches on each rank; `what` says where `ranks` comes from."""
    group = config.ds.group_size
    dp, odd = max(1, ranks // group), ranks % group
    share, rest = divmod(config.train.batch_size, dp)
    return [
        (odd, f"{ranks} processes ({what}) do not divide into groups of {group} "
         "(--ds.ring_attn_size x --ds.tensor_parallel_size)."),
        (not odd and rest, f"<train.batch_size> does not divide by {dp} data-parallel ranks "
         f"({what}): use {max(1, share) * dp} or {(share + 1) * dp}."),
        (not odd and not rest and share % max(1, micro), f"<train.batch_size> gives each of {dp} "
         f"rank(s) ({what}) {share} samples, which do not divide by --train.micro_batch_size "
         f"{micro}."),
    ]
