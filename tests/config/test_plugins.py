"""Names that plug-ins register become valid choices for their flags."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.config import choices, plugins
from openrlhf.config.commands import Command
from openrlhf.config.options import ConfigError, Reader, parse_config
from openrlhf.config.ppo import PPOConfig
from tests.config.commands import ppo, violations

PLUGIN = """
from openrlhf.config import choices, plugins
choices.ESTIMATORS["mine"] = choices.EstimatorTraits(per_group=True)
choices.POLICY_LOSSES["my_loss"] = choices.LossTraits(aggregation="sequence")
"""
TABLES = (choices.ESTIMATORS, choices.POLICY_LOSSES, choices.CORRECTIONS, choices.KL_ESTIMATORS)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """Write a plug-in file, and unregister the plug-in's names after the test."""
    before = [dict(table) for table in TABLES]
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    yield file
    for table, names in zip(TABLES, before, strict=True):
        for name in [name for name in table if name not in names]:
            del table[name]


def test_names_and_traits_registered_by_a_plugin_are_used(plugin: Path) -> None:
    line = f"--plugin {plugin} --algo.advantage.estimator mine --actor.policy_loss_type my_loss"
    (sentence,) = violations("train_ppo_ray", line)
    assert "--algo.advantage.estimator mine compares the samples of a prompt" in sentence
    config = ppo(f"{line} --rollout.n_samples_per_prompt 2")
    assert config.plugin == (str(plugin),)
    assert config.estimator_traits.per_group
    assert config.algo.loss.aggregation == "sequence"


def test_plugin_is_imported_once_per_process(plugin: Path) -> None:
    for _ in range(2):
        ppo(f"--plugin {plugin} --algo.advantage.estimator mine --rollout.n_samples_per_prompt 2")


def test_several_plugins_may_be_given_as_a_list_or_by_repeating_the_flag(
    plugin: Path, tmp_path: Path
) -> None:
    others = [tmp_path / "b.py", tmp_path / "c.py"]
    for other in others:
        other.write_text("")
    config = ppo(f"--plugin {plugin} {others[0]} --plugin {others[1]}")
    assert config.plugin == tuple(map(str, [plugin, *others]))


def test_configuration_file_may_name_a_plugin_and_use_its_names(
    plugin: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"plugin: {plugin}\nalgo.advantage.estimator: mine\n")
    words = (
        "--reward.verifier math --data.label_key l --rollout.n_samples_per_prompt 2 "
        "--data.prompt_dataset d"
    )
    words = f"--config {file} --actor.model_name_or_path m {words}"
    config = parse_config(PPOConfig, words.split(), command="train_ppo_ray")
    assert (config.plugin, config.algo.advantage.estimator) == ((str(plugin),), "mine")


def test_plugins_of_a_file_are_loaded_for_a_command_without_other_flags(
    plugin: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"plugin: {plugin}\n")
    reader = Reader(Command, "").read(["--config", str(file)])
    assert reader.given == {"plugin": (str(plugin),)}


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train_ppo_ray", "--algo.advantage.estimator"),
        ("train_ppo_ray", "--algo.advantage.is_correction_type"),
        ("train_ppo_ray", "--algo.kl.estimator"),
        ("train_ppo_ray", "--actor.policy_loss_type"),
        ("train_dpo", "--model.loss_type"),
    ],
)
def test_error_for_an_unknown_registered_choice_mentions_the_plugin_flag(
    command: str, flag: str
) -> None:
    sentences = violations(command, f"{flag} median")
    assert any(
        f"{flag} must be one of" in sentence and "--plugin" in sentence for sentence in sentences
    )


def test_error_for_an_unknown_fixed_choice_does_not_mention_the_plugin_flag() -> None:
    assert "--plugin" not in " ".join(violations("train_sft", "--ds.param_dtype bf17"))


REGISTRATIONS = """
from openrlhf.algorithms.advantages import advantage_estimator
from openrlhf.config.choices import CORRECTIONS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.policy_losses import policy_loss
from openrlhf.config import choices, plugins

@advantage_estimator("my_estimator", per_group=True)
def mine(rewards, group): return rewards
@policy_loss("my_loss", aggregation="sequence")
def loss(*args, **kwargs): ...
@policy_loss("my_clipped_loss")
def clipped(*args, **kwargs): ...
@KL_ESTIMATORS.register("my_kl")
def kl(log_ratio): return log_ratio
CORRECTIONS["my_correction"] = ("sequence", "truncate")
CORRECTIONS["my_mean"] = ("geometric", "clip")
choices.POLICY_LOSSES["my_clipped_loss"] = choices.LossTraits(clip=(0.5, 0.25))
"""
ACCEPTED = """
import sys
from openrlhf.config import choices, plugins
from tests.config.commands import ppo, violations
line = "--plugin " + sys.argv[1] + " --algo.kl.estimator my_kl --actor.policy_loss_type "
more = " --algo.advantage.estimator my_estimator"
more += " --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 3"
more += " --algo.advantage.is_correction_type "
more += sys.argv[2]
(sentence,) = violations("train_ppo_ray", line + "my_loss" + more)
assert "my_estimator compares the samples of a prompt" in sentence, sentence
config = ppo(line + "my_loss --rollout.n_samples_per_prompt 2" + more)
assert config.algo.loss.aggregation == "sequence"
assert config.estimator_traits.per_group and not config.estimator_traits.needs_critic
assert (config.algo.kl.estimator, config.actor.eps_clip_low_high) == ("my_kl", (0.2, 0.2))
advantage = config.algo.advantage
found = (advantage.is_correction_level, advantage.is_correction_mode)
print(*found, *advantage.is_correction_threshold)
assert ppo(line + "my_clipped_loss").actor.eps_clip_low_high == (0.5, 0.25)
"""


@pytest.mark.parametrize(
    ("preset", "correction"),
    [
        ("tis", "token clip 0.5 3.0"),
        ("my_correction", "seq-product clip 0.0 3.0"),
        ("my_mean", "seq clip 0.5 3.0"),
    ],
)
def test_algorithms_registered_by_a_plugin_become_flag_choices(
    preset: str, correction: str, tmp_path: Path
) -> None:
    """The plug-in registers estimators, losses, KL estimators and corrections.

    The plug-in is loaded in a separate process, because registered names cannot be removed.
    """
    file = tmp_path / "mine.py"
    file.write_text(REGISTRATIONS)
    words = [sys.executable, "-c", ACCEPTED, str(file), preset]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == correction.split()


def test_correction_preset_with_a_nonexistent_level_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(choices.CORRECTIONS, "mine", ("word", "clip"))
    line = "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type mine"
    (sentence,) = violations("train_ppo_ray", line)
    assert "--algo.advantage.is_correction_level must be one of" in sentence
    assert "'word'" in sentence


def test_plugin_choice_is_unknown_without_the_plugin() -> None:
    (sentence,) = violations("train_ppo_ray", "--algo.advantage.estimator mine")
    assert "--algo.advantage.estimator must be one of gae, reinforce" in sentence


def test_error_names_the_failed_plugin_and_its_exception(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--plugin .*bad\.py failed: ZeroDivisionError"):
            ppo(f"--plugin {file}")
    file.write_text("def half(x):\n    return x / 0\n\n\nhalf(1)\n")
    with pytest.raises(
        ConfigError, match=r"\n.*bad\.py, line 5: half.*\n.*, line 2: return x / 0$"
    ):
        ppo(f"--plugin {file}")
    with pytest.raises(ConfigError, match=r"--plugin gone\.py is not a readable Python file"):
        ppo("--plugin gone.py")


# ---- installed packages


@pytest.fixture
def installed(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Simulate a pip installation of a package whose entry point is the plug-in's module."""
    folder = plugin.parent
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[openrlhf.plugins]\nfirst = installed_plugin\n")
    plugin.rename(folder / "installed_plugin.py")
    monkeypatch.syspath_prepend(folder)
    plugins._load_installed.cache_clear()
    yield folder
    sys.modules.pop("installed_plugin", None)
    monkeypatch.undo()
    plugins._load_installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_entry_points_of_installed_packages_are_loaded_without_a_flag() -> None:
    for _ in range(2):
        config = ppo("--algo.advantage.estimator mine --rollout.n_samples_per_prompt 2")
        assert config.estimator_traits.per_group and config.plugin == ()


def test_error_names_the_package_of_a_failed_plugin_on_every_attempt(installed: Path) -> None:
    (installed / "installed_plugin.py").write_text("1 / 0\n")
    named = (
        r"plug-in first = installed_plugin of the installed package my-package failed: "
        r"ZeroDivisionError"
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=named):
            ppo()
