"""Flags whose features are not available yet. They are refused by name."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import flags_in, flags_of, mentions

# What to do instead, by flag or section. All values except the default are refused. Removing an
# entry enables its feature.
NOT_YET = {
    "ds.use_liger_kernel": "leave it out",
    "ds.deepcompile": "leave it out",
    "ds.torch_compile": "leave it out",
    "ds.nvme_path": "leave it out",
    "ds.experts_implementation": "leave it out",
    "actor.freeze_visual_encoder": "leave it out",
    "ds.ring_attn_size": "use 1 and a smaller --data.max_len",
    "ds.tensor_parallel_size": "use 1 and --ds.zero_stage 3",
    "ds.zpg": "use 1",
    "optim": "use adam",
    "actor.optim": "use adam",
    "critic.optim": "use adam",
    "use_ms": "download the files first and give their paths",
    "data.max_images_per_prompt": "use text prompts",
}


def refused_flags(root: type[Any]) -> set[str]:
    """Return the flags of a command that are refused at any value except their default.

    They include flags that have no effect without a refused flag.
    """
    conditions = unused_flags(root())
    refused: set[str] = set()
    for path in flags_of(root):
        if _listed_name(path) or mentions(conditions.get(path, ""), NOT_YET):
            refused.add(path)
    return refused


def _listed_name(path: str) -> str | None:
    """Return the entry of `NOT_YET` for a flag or for a section that contains it, or None."""
    for name in accumulate(path.split("."), "{}.{}".format):
        if name in NOT_YET:
            return name
    return None


def refusals(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each flag that sets an unavailable feature, with the message about it."""
    for flag, value in flags_in(config):
        name = _listed_name(flag.path)
        if name and value != flag.default:
            yield flag.path, f"{flag.typed(value)} is not available yet: {NOT_YET[name]}."
