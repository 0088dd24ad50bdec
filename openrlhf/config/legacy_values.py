"""Flags of earlier releases that are now part of other flags, or whose values were renamed.

Old flags are translated after the command line and the configuration file have been merged, because
one current flag may depend on several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.config.algorithm import AdvantageConfig
from openrlhf.config.choices import CORRECTIONS
from openrlhf.config.flags import Flag, Section, flags_of, switch, unset

LEVELS = {"token": "token", "sequence": "seq-product", "geometric": "seq"}
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
LEVEL = "algo.advantage.is_correction_level"
MODE = "algo.advantage.is_correction_mode"
GATING = "algo.advantage.is_correction_gating"
THRESHOLD = "algo.advantage.is_correction_threshold"
ENABLE = "algo.advantage.is_correction_enable"
TYPE = "algo.advantage.is_correction_type"
AGGREGATION = "algo.loss.aggregation"
# The current flag to suggest instead of each old one.
SUCCESSORS = {
    ENABLE: LEVEL,
    TYPE: LEVEL,
    "algo.correction.level": LEVEL,
    "algo.correction.mode": MODE,
    "algo.correction.band": THRESHOLD,
    "actor.loss_agg_mode": AGGREGATION,
}


class _OldAdvantageConfig(Section):
    is_correction_enable: bool = switch("Correct the loss with a preset.")
    is_correction_type: str | None = unset("Preset.", choices=CORRECTIONS)


class _OldCorrectionConfig(Section):
    level: str | None = unset("Level.", choices=LEVELS.keys())
    mode: str | None = unset("Mode.", choices=("clip", "mask", "truncate"))
    band: tuple[float, float] | None = unset("Lower and upper bound.")


class _OldAlgoConfig(Section):
    advantage: _OldAdvantageConfig = _OldAdvantageConfig()
    correction: _OldCorrectionConfig = _OldCorrectionConfig()


class _OldActorConfig(Section):
    loss_agg_mode: str | None = unset("Aggregation.", choices=AGGREGATIONS.keys())


class _OldConfig(Section):
    algo: _OldAlgoConfig = _OldAlgoConfig()
    actor: _OldActorConfig = _OldActorConfig()


OLD_FLAGS = flags_of(_OldConfig)


def accepted_flags(root: type[Any]) -> Mapping[str, Flag]:
    """Return the current flags of a command and the old flags that it accepts, keyed by path."""
    flags = flags_of(root)
    if LEVEL in flags:
        return {**flags, **OLD_FLAGS}
    return flags


def current_values(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the values of old flags to values of current flags, keyed by flag path.

    A preset without its switch had no effect, so it is not translated. `given` contains the current
    flags that the user set in addition to old flags. Current flags take precedence, unless only the
    threshold is set: older releases used it only together with a preset, and ignored its lower
    bound in the mode `truncate`.
    """
    values = _correction_values(old, given)
    if mean := old.get("actor.loss_agg_mode"):
        values[AGGREGATION] = AGGREGATIONS[mean]
    is_current = any(path in given for path in (LEVEL, MODE, GATING))
    kept: dict[str, Any] = {}
    for path, value in values.items():
        if path not in given or (path == THRESHOLD and not is_current):
            kept[path] = value
    return kept


def _correction_values(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    level = None
    mode = None
    if old.get(ENABLE):
        level, mode = CORRECTIONS.get(old.get(TYPE, "tis"), (None, None))
    level = old.get("algo.correction.level") or level
    mode = old.get("algo.correction.mode") or mode
    band = old.get("algo.correction.band")
    values: dict[str, Any] = {}
    if level:
        values[LEVEL] = LEVELS.get(level, level)
    if band:
        values[THRESHOLD] = band
    if mode == "truncate":  # an upper bound only
        _, high = band or given.get(THRESHOLD, AdvantageConfig().is_correction_threshold)
        values[MODE] = "clip"
        values[THRESHOLD] = [0.0, high]
    elif mode:
        values[MODE] = mode
    return values
