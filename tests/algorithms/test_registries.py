"""Tests of the registry of named choices, and of its consistency with the flags' choices."""

from typing import get_args

import pytest

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.corrections import Gating, Level, Mode
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.policy_losses import AGGREGATIONS, POLICY_LOSSES
from openrlhf.algorithms.registry import Registry
from openrlhf.config import choices
from openrlhf.config.algorithm import AdvantageConfig
from openrlhf.config.flags import flags_of


def test_registering_a_name_twice_raises_an_error() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.add("two", 2)
    with pytest.raises(ValueError, match=r"number 'one'.*one, two"):
        registry.add("one", 3)
    assert registry["one"] == 1


def test_unknown_name_raises_an_error_with_the_known_names() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.add("two", 2)
    with pytest.raises(ValueError, match=r"number 'three'.* one, two"):
        _ = registry["three"]


def test_decorator_registers_and_returns_the_function() -> None:
    registry: Registry[object] = Registry("thing")

    @registry.register("f")
    def f() -> None: ...

    assert registry["f"] is f
    assert "f" in registry
    assert list(registry) == ["f"]


# The flags


def test_flag_choices_match_the_registered_estimators_and_their_traits() -> None:
    registered = {name: ADVANTAGE_ESTIMATORS[name].traits for name in ADVANTAGE_ESTIMATORS}
    assert registered == choices.ESTIMATORS


def test_flag_choices_match_the_registered_policy_losses() -> None:
    assert list(POLICY_LOSSES) == list(choices.POLICY_LOSSES)
    aggregations = {traits.aggregation for traits in choices.POLICY_LOSSES.values()}
    assert aggregations <= set(AGGREGATIONS)


def test_registering_a_function_adds_its_name_and_traits_to_the_flag_choices() -> None:
    table = {"known": 1}
    registry: Registry[object] = Registry("thing", table, lambda weight=5: weight)
    registry.register("known", weight=2)(object())
    registry.register("new", weight=3)(object())
    registry.register("plain")(object())
    assert table == {"known": 1, "new": 3, "plain": 5}


def test_flag_choices_match_the_levels_modes_and_gates_of_a_correction() -> None:
    flags = flags_of(AdvantageConfig)
    parts = {"level": Level, "mode": Mode, "gating": Gating}
    for name, part in parts.items():
        accepted = set(flags[f"is_correction_{name}"].choices or ())
        assert accepted - {"off"} == set(get_args(part))


def test_flag_choices_match_the_registered_kl_estimators() -> None:
    assert list(KL_ESTIMATORS) == list(choices.KL_ESTIMATORS)
