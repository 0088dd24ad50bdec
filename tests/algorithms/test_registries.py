"""Choices by name: the registry itself, and its agreement with the names that the flags accept."""

from typing import get_args

import pytest

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.corrections import Level, Mode
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.policy_losses import AGGREGATIONS, POLICY_LOSSES
from openrlhf.algorithms.registry import Registry
from openrlhf.config import choices


def test_registering_name_twice_raises_error() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.add("two", 2)
    with pytest.raises(ValueError, match=r"number 'one'.*one, two"):
        registry.add("one", 3)
    assert registry["one"] == 1


def test_unknown_name_raises_error_with_known_names() -> None:
    registry: Registry[int] = Registry("number")
    registry.add("one", 1)
    registry.add("two", 2)
    with pytest.raises(ValueError, match=r"number 'three'.* one, two"):
        _ = registry["three"]


def test_decorator_registers_and_returns_function() -> None:
    registry: Registry[object] = Registry("thing")

    @registry.register("f")
    def f() -> None: ...

    assert registry["f"] is f
    assert "f" in registry
    assert list(registry) == ["f"]


# The flags


def test_flag_choices_and_registry_have_same_estimators_and_needs() -> None:
    registered = {
        name: (entry.per_group, entry.needs_critic, entry.whiten)
        for name, entry in ((name, ADVANTAGE_ESTIMATORS[name]) for name in ADVANTAGE_ESTIMATORS)
    }
    assert registered == {
        name: (e.needs_groups, e.needs_critic, e.whitened) for name, e in choices.ESTIMATORS.items()
    }


def test_flag_choices_and_registry_have_same_policy_losses() -> None:
    registered = {name: POLICY_LOSSES[name].aggregation for name in POLICY_LOSSES}
    assert registered == {name: loss.aggregation for name, loss in choices.POLICY_LOSSES.items()}
    assert set(registered.values()) <= set(AGGREGATIONS)


def test_correction_presets_have_valid_levels_and_modes() -> None:
    assert all(
        level in get_args(Level) and mode in get_args(Mode)
        for level, mode in choices.CORRECTIONS.values()
    )


def test_flag_choices_and_registry_have_same_kl_estimators() -> None:
    assert list(KL_ESTIMATORS) == list(choices.KL_ESTIMATORS)
