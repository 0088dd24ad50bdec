"""Selection of the layers that tensor parallelism splits, according to Transformers' plan.

The plan is checked before a model is loaded, and is used to split the layers.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from openrlhf.config.flags import UserError

COLUMN = "colwise"
ROW = "rowwise"
REPLICATED = "replicated_with_grad_allreduce"  # for weights such as norms of split heads


def split_patterns(config: Any, ranks: int) -> dict[str, list[str]]:
    """Return regular expressions for the layers to split over `ranks` ranks, by kind of split.

    `config` is a Transformers configuration. A part of a layer (attention, MLP) is split only if
    the plan splits all of it by columns and rows. Raises UserError if nothing can be split, or if
    the ranks cannot get equal numbers of key-value heads.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % ranks:
        nearest = max(size for size in range(1, ranks) if heads % size == 0)
        raise UserError(
            f"--ds.tensor_parallel_size {ranks} does not divide the {heads} key-value head(s) of "
            f"the model ({config.model_type}). Use --ds.tensor_parallel_size {nearest}, or "
            "--ds.zero_stage 3, which shards every weight."
        )
    patterns: defaultdict[str, list[str]] = defaultdict(list)
    for styles in _splittable_parts(getattr(text, "base_model_tp_plan", None) or {}):
        for name, style in styles.items():
            patterns[style].append(".*" + name.replace(".", r"\.").replace("*", r"\d+"))
    if not patterns[ROW]:
        raise UserError(
            f"--ds.tensor_parallel_size {ranks}: Transformers has no plan for splitting the layers "
            f"of {config.model_type}. Use --ds.tensor_parallel_size 1 and --ds.zero_stage 3."
        )
    return patterns


def _splittable_parts(plan: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the parts of a layer that a plan splits by columns and rows only."""
    parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, style in plan.items():
        parts[name.rpartition(".")[0]][name] = style
    for styles in parts.values():
        kinds = set(styles.values())
        if {COLUMN, ROW} <= kinds <= {COLUMN, ROW, REPLICATED}:
            yield styles
