"""Derived values and rules of every training command, and how both are applied.

A derivation says which values follow from a configuration, a rule what is wrong with it. Both are
small named functions in a list; all broken rules are reported together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.config import machine
from openrlhf.config.flags import amend, bound_violations, flags_in, value_at
from openrlhf.config.shared import OptimizerConfig, RootConfig
from openrlhf.config.unsupported import refusals

C = TypeVar("C")
FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a configuration came about."""

    command: str
    explicit: frozenset[str]  # the paths the user gave, by flag or file


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What follows: values by path, and a notice where the user should know."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notice: str = ""


Derivation = Callable[[C, Request], Derived | None]
Rule = Callable[[C], str | Iterable[str] | None]


def derive(
    config: C, derivations: Sequence[Derivation[C]], request: Request
) -> tuple[C, list[str]]:
    """The configuration with each derivation applied in turn, and the notices."""
    notices: list[str] = []
    for derivation in derivations:
        derived = derivation(config, request)
        if derived is not None:
            config = amend(config, derived.values)
            notices += [derived.notice] if derived.notice else []
    return config, notices


def violations(config: C, rules: Sequence[Rule[C]]) -> list[str]:
    """All that is wrong: unset or out of bounds, not there yet, broken rules."""
    found = [*bound_violations(config), *refusals(config)]
    for rule in rules:
        broken = rule(config)
        found += [broken] if isinstance(broken, str) else broken or []
    return found


def items(text: str | None) -> list[str]:
    """The parts of a comma list, without blanks."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


# Derived values


def name_the_run(config: RootConfig, request: Request) -> Derived:
    """Run folder and tracker name carry the time of the start."""
    folder = f"./runs/{request.command}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = config.run_name_prefix + time.strftime("%m%dT%H:%M")
    return Derived(
        values={
            "run.dir": config.run.dir or folder,
            "logger.wandb.run_name": config.logger.wandb.run_name or name,
        }
    )


def template_without_place(config: RootConfig, request: Request) -> Derived | None:
    """A template the prompt cannot enter is not used."""
    template = config.data.input_template
    if template is None or "{}" in template:
        return None
    return Derived(
        values={"data.input_template": None},
        notice=f"--data.input_template {template!r} has no {{}} for the prompt and is not used.",
    )


def template_with_escaped_newline(config: RootConfig, request: Request) -> Derived | None:
    """Shells pass backslash and n as they are."""
    if "\\n" not in (config.data.input_template or ""):
        return None
    return Derived(
        notice="--data.input_template contains a backslash and an n, not a line break; in bash a "
        "line break is written $'\\n'."
    )


def attention_for_packing(config: RootConfig, request: Request) -> Derived | None:
    """Packing needs an attention that keeps samples apart."""
    wanted = config.ds.attn_implementation
    if not config.ds.packing_samples or "flash" in wanted or wanted == "sdpa":
        return None
    return Derived(
        values={"ds.attn_implementation": "flash_attention_2"},
        notice=f"--ds.packing_samples does not work with --ds.attn_implementation {wanted}: "
        "FlashAttention 2 is used where it is there, sdpa elsewhere.",
    )


def attention_in_effect(config: RootConfig, request: Request) -> Derived | None:
    """FlashAttention 2 where CUDA and the package are there, SDPA elsewhere."""
    wanted = config.ds.attn_implementation
    chosen = "ds.attn_implementation" in request.explicit
    runs_here = machine.has_flash_attention() and config.ds.param_dtype != "fp32"
    if "flash_attention" not in wanted or runs_here:
        return None
    if chosen and machine.count_gpus() > 0:
        return None  # a rule refuses it
    notice = f"No GPU on this machine: sdpa instead of --ds.attn_implementation {wanted}."
    return Derived(values={"ds.attn_implementation": "sdpa"}, notice=notice if chosen else "")


def evaluation_without_data(config: RootConfig, request: Request) -> Derived | None:
    """An interval alone evaluates nothing."""
    if config.eval.dataset or config.eval.steps < 0:
        return None
    return Derived(notice="--eval.steps has no effect without --eval.dataset.")


def checkpoints_of_nothing(config: RootConfig, request: Request) -> Derived | None:
    """Neither engine state nor export is asked for."""
    ckpt = config.ckpt
    if ckpt.save_steps < 0 or not ckpt.disable_ds or ckpt.save_hf:
        return None
    return Derived(
        notice="--ckpt.save_steps saves nothing: --ckpt.disable_ds is on and --ckpt.save_hf off."
    )


def muon_notice(prefix: str, optimizer: OptimizerConfig) -> Derived | None:
    """What Muon ignores or applies differently."""
    if optimizer.optim != "muon":
        return None
    odd = {
        "muon.ns_steps is ignored": optimizer.muon.ns_steps != 5,
        "muon.no_nesterov is ignored": not optimizer.muon.nesterov,
        "max_norm clips after orthogonalisation": optimizer.max_norm > 0,
        "adam.weight_decay applies to every weight": optimizer.adam.weight_decay > 0,
    }
    parts = [f"--{prefix}{text}" for text, holds in odd.items() if holds]
    return Derived(notice=f"With Muon: {'; '.join(parts)}.") if parts else None


SHARED_DERIVATIONS: tuple[Derivation[Any], ...] = (
    name_the_run,
    template_without_place,
    template_with_escaped_newline,
    attention_for_packing,
    attention_in_effect,
    evaluation_without_data,
    checkpoints_of_nothing,
)


# Rules


def sources_exist(config: RootConfig) -> Iterator[str]:
    """Models and datasets that can only be local are there; dataset scripts are refused."""
    for flag, value in flags_in(config):
        for item in items(value) if flag.info.holds else []:
            path = item.partition("@")[0] if flag.info.holds == "dataset" else item
            if flag.info.holds == "dataset" and path.endswith(".py"):
                yield (
                    f"{flag.name} {path} is a Python script, which the datasets library no longer "
                    "runs. Convert the data to parquet or jsonl and give that."
                )
            elif looks_local(path) and not Path(path).expanduser().exists():
                yield f"{flag.name} {path} does not exist on this machine."


def looks_local(path: str) -> bool:
    """Whether a text can only be a path: hub names are `name` or `owner/name`."""
    if "://" in path:
        return False
    return (
        path.startswith(("/", "./", "../", "~"))
        or path.count("/") > 1
        or path.endswith(FILE_ENDINGS)
    )


def probabilities(dataset_flag: str, probs_flag: str) -> Rule[Any]:
    """The rule that one dataset has one probability, and that they sum to 1."""

    def probabilities_match_datasets(config: Any) -> str | None:
        datasets, texts = (items(value_at(config, flag)) for flag in (dataset_flag, probs_flag))
        if not texts:
            return None
        try:
            numbers = [float(text) for text in texts]
        except ValueError:
            return f"--{probs_flag} takes numbers separated by commas, not {','.join(texts)!r}."
        if len(numbers) != len(datasets):
            return (
                f"--{probs_flag} has {len(numbers)} numbers, but --{dataset_flag} has "
                f"{len(datasets)} datasets: give one each."
            )
        if min(numbers) < 0 or abs(sum(numbers) - 1) > 1e-6:
            return f"--{probs_flag} {','.join(texts)} must be positive and sum to 1."
        return None

    return probabilities_match_datasets


def attention_is_there(config: RootConfig) -> str | None:
    """An attention that was asked for on a GPU machine must be able to run."""
    wanted = config.ds.attn_implementation
    if wanted != "flash_attention_2" or machine.has_flash_attention():
        return None
    return (
        "--ds.attn_implementation flash_attention_2 needs the package flash-attn, which is not "
        "installed. Install it, or use sdpa."
    )


def flash_attention_has_16_bits(config: RootConfig) -> str | None:
    """FlashAttention has no fp32 kernel."""
    if "flash_attention" not in config.ds.attn_implementation or config.ds.param_dtype != "fp32":
        return None
    return "--ds.param_dtype fp32 needs --ds.attn_implementation sdpa: FlashAttention has no fp32."


def fp16_has_limits(config: RootConfig) -> Iterator[str]:
    """fp16 combines with neither 4-bit weights nor tensor parallelism."""
    if config.ds.param_dtype == "fp16" and config.ds.load_in_4bit:
        yield "--ds.load_in_4bit computes in bf16: use --ds.param_dtype bf16 instead of fp16."
    if config.ds.param_dtype == "fp16" and config.ds.tensor_parallel_size > 1:
        yield "--ds.tensor_parallel_size above 1 needs --ds.param_dtype bf16 instead of fp16."


def batch_fits_ranks(config: RootConfig, ranks: int, *, micro: int, what: str) -> Iterator[str]:
    """The batch is whole micro-batches on each rank; `what` says where `ranks` comes from."""
    group = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    size, dp = config.train.batch_size, max(1, ranks // group)
    if ranks % group:
        yield (
            f"{ranks} processes ({what}) do not divide into groups of {group} "
            "(--ds.ring_attn_size x --ds.tensor_parallel_size)."
        )
    elif size % dp:
        yield (
            f"--train.batch_size {size} does not divide by {dp} data-parallel ranks ({what}): "
            f"use {max(dp, size // dp * dp)} or {(size // dp + 1) * dp}."
        )
    elif (size // dp) % micro:
        yield (
            f"--train.batch_size {size} gives each of {dp} rank(s) ({what}) {size // dp} samples, "
            f"which do not divide by --train.micro_batch_size {micro}."
        )


SHARED_RULES: tuple[Rule[Any], ...] = (
    sources_exist,
    attention_is_there,
    flash_attention_has_16_bits,
    fp16_has_limits,
)
