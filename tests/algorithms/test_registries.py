"""Choices by name: the registry itself, and its agreement with the names that the flags accept."""

from typing import get_args

import pytest

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.corrections import Level, Mode
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.policy_losses import AGGREGATIONS, POLICY_LOSSES
from openrlhf.algorithms.registry import Registry
from openrlhf.config import choices


def test_a_name_is_given_once() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.add("two", 2)
    with pytest.raises(ValueError, match=r"number 'one' is registered already.*one, two"):
        registry.add("one", 3)
    assert registry["one"] == 1


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.add("two", 2)
    with pytest.raises(ValueError, match="there is no number 'three'; known are one, two"):
        _ = registry["three"]


def test_a_decorator_registers_and_returns_what_it_decorates() -> None:
    registry: Registry[object] = Registry("thing")

    @registry.register("f")
    def f() -> None: ...

    assert registry["f"] is f
    assert "f" in registry
    assert list(registry) == ["f"]


# The flags


def test_flags_and_registry_know_the_same_estimators_with_the_same_needs() -> None:
    registered = {
        name: (entry.per_group, entry.needs_critic, entry.whiten)
        for name, entry in ((name, ADVANTAGE_ESTIMATORS[name]) for name in ADVANTAGE_ESTIMATORS)
    }
    assert registered == {name: (e.needs_groups, e.needs_critic, e.whitened) for name, e in choices.ESTIMATORS.items()}


def test_flags_and_registry_know_the_same_policy_losses() -> None:
    registered = {name: POLICY_LOSSES[name].aggregation for name in POLICY_LOSSES}
    assert registered == {name: loss.aggregation for name, loss in choices.POLICY_LOSSES.items()}
    assert set(registered.values()) <= set(AGGREGATIONS)


def test_presets_of_the_correction_have_known_levels_and_modes() -> None:
    assert all(level in get_args(Level) and mode in get_args(Mode) for level, mode in choices.CORRECTIONS.values())


def test_flags_and_registry_know_the_same_kl_estimators() -> None:
    assert list(KL_ESTIMATORS) == list(choices.KL_ESTIMATORS)
