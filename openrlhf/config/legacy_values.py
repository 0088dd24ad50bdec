"""Flags of earlier releases that were combined, or whose values have other names now.

They are translated after the command line and the configuration file have been merged, because
several of them together determine one current flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.config.flags import Flag, Section, flags_of, option

LEVELS = {"token": "token", "sequence": "seq-product", "geometric": "seq"}
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
# Level and mode of each preset. TIS: Yao et al. 2025, fengyao.notion.site/off-policy-rl. IcePop:
# Ling team 2025, ringtech.notion.site/icepop.
PRESETS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
LEVEL, MODE, THRESHOLD = (
    f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "threshold")
)
ENABLE, TYPE = "algo.advantage.is_correction_enable", "algo.advantage.is_correction_type"


class _OldAdvantageConfig(Section):
    is_correction_enable: bool = option(False, "Correct the loss with a preset.")
    is_correction_type: str | None = option(None, "Preset.", choices=PRESETS.keys())


class _OldCorrectionConfig(Section):
    level: str | None = option(None, "Level.", choices=LEVELS.keys())
    mode: str | None = option(None, "Mode.", choices=("clip", "mask", "truncate"))
    band: tuple[float, float] | None = option(None, "Lower and upper bound.")


class _OldAlgoConfig(Section):
    advantage: _OldAdvantageConfig = _OldAdvantageConfig()
    correction: _OldCorrectionConfig = _OldCorrectionConfig()


class _OldActorConfig(Section):
    loss_agg_mode: str | None = option(None, "Aggregation.", choices=AGGREGATIONS.keys())


class _OldConfig(Section):
    algo: _OldAlgoConfig = _OldAlgoConfig()
    actor: _OldActorConfig = _OldActorConfig()


def combined_flags(flags: Mapping[str, Flag]) -> Mapping[str, Flag]:
    """Return the old flags that a command with these flags accepts, by path."""
    if LEVEL in flags:
        return flags_of(_OldConfig)
    return {}


def current_values(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of current flags, by path, that the values of old flags stand for.

    A preset without its switch had no effect and stands for no value.
    """
    values: dict[str, Any] = {}
    if old.get(ENABLE):
        values[LEVEL], values[MODE] = PRESETS[old.get(TYPE, "tis")]
    if level := old.get("algo.correction.level"):
        values[LEVEL] = LEVELS[level]
    if band := old.get("algo.correction.band"):
        values[THRESHOLD] = band
    match old.get("algo.correction.mode"):
        case "truncate":  # an upper bound only
            _, high = values.get(THRESHOLD, (0.0, 5.0))
            values[MODE], values[THRESHOLD] = "clip", (0.0, high)
        case "clip" | "mask" as mode:
            values[MODE] = mode
        case _:
            pass
    if mean := old.get("actor.loss_agg_mode"):
        values["algo.loss.aggregation"] = AGGREGATIONS[mean]
    return values
