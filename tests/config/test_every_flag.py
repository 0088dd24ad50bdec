"""Every flag of every command has an effect.

Setting a flag changes a component's settings, prints a notice, or is rejected by name.

The settings of all components are created from a resolved configuration, without starting any
component. A component that gets an entire section may still ignore some of the section's flags.
Therefore the tests also create the objects derived from a section: an optimizer and DeepSpeed's
configuration. For all other components, `READERS` lists the modules that read the flags.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.config import machine
from openrlhf.config.flags import FOR_OLDER_SCRIPTS, Flag, Section, amend, flags_of, mentions
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig, EngineCommand
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.config.unsupported import refusals
from openrlhf.core.trajectory import Prompt
from openrlhf.launch import settings
from openrlhf.launch.start import plan_placement
from openrlhf.models import loading
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rollout.engine_settings import engine_arguments
from openrlhf.trainers import tasks
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.training.ds_config import inference_config, training_config
from openrlhf.training.optimizers import make_optimizer, make_schedule
from openrlhf.workers.base import MicroBatchLimits
from openrlhf.workers.policy import clip_of, correction_of
from tests.config.commands import COMMANDS, SMALLEST, read_flags
from tests.sources import ROOT, package

LINES = SMALLEST | {
    "reward_test": "--data.prompt_dataset d --data.label_key l --reward.verifier math",
    "lora_combiner": "--model_path m --lora_path a --output_path o",
    "pipeline": "--file p.yaml",
    "doctor": "",
    "plan": "--command sft",
}
EVERY_FLAG = [(command, path) for command, root in COMMANDS.items() for path in flags_of(root)]

NOT_YET = "not available yet"
# Arguments for flags whose generated values would break a rule or change nothing.
VALUES = {
    "algo.advantage.is_correction_gating": "--algo.advantage.is_correction_gating tv",
    "actor.dual_clip": "--actor.dual_clip 3",
    "ckpt.max_mem": "--ckpt.max_mem 5",
    "reward.on_error": "--reward.on_error drop",
    "rollout.seeded": "--rollout.seeded off",
    "algo.advantage.estimator": "--algo.advantage.estimator gae",
    "critic.freezing_steps": "--critic.freezing_steps 2",
    "plugin": "",
}
# Additional arguments that a flag needs to have an effect.
BESIDE = {
    "vllm.disable_prefix_caching": "--rollout.n_samples_per_prompt 2",
    "vllm.enable_prefix_caching": "--eval.n_samples_per_prompt 1",
}
# Arguments that meet requirements, keyed by the wording of the requirement in notices.
ASKED_FOR = {
    "--ckpt.save_steps": "--ckpt.save_steps 1",
    "a critic (--algo.advantage.estimator gae)": "--algo.advantage.estimator gae",
}
# Modules that receive entire sections or read flags, keyed by command.
# Each flag must be read as `section.flag` in at least one module.
TRAINING = (
    "launch.offline launch.beginning trainers.tasks trainers.supervised trainers.best "
    "observability.recorder observability.trackers models.adapters models.loading "
    "models.checkpointing"
)
READERS = {
    "lora_combiner": "checkpoints.combine",
    "train_sft": f"{TRAINING} trainers.sft data.rows data.sft data.first_look",
    "train_rm": f"{TRAINING} trainers.reward data.rows data.feedback",
    "train_dpo": f"{TRAINING} trainers.preference data.rows data.feedback launch.precompute",
    "train_kto": f"{TRAINING} trainers.kto trainers.preference data.rows data.feedback data.sft",
    "train_prm": f"{TRAINING} trainers.process_reward data.steps",
    "train_kd": f"{TRAINING} trainers.distill trainers.sft data.rows data.sft data.first_look",
    "train_ppo_ray": "launch.start launch.beginning launch.reinforcement launch.run launch.stages "
    "launch.workers launch.prompt_data launch.agents agents.play trainers.ppo "
    "trainers.evaluation trainers.checkpointing trainers.model_update "
    "trainers.experience_maker rewards.rule rewards.function rewards.preview "
    "observability.recorder observability.trackers data.rows data.prompts data.first_look "
    "trainers.sources trainers.async_source trainers.stages models.adapters models.loading "
    "models.checkpointing workers.base "
    "workers.policy workers.critic workers.frozen checkpoints.manager rollout.fleet "
    "cluster.placement",
    "serve_rm": "serving.server serving.scorer models.loading",
    "eval": "evaluation.runs evaluation.processes trainers.reward trainers.sources trainers.stages "
    "workers.frozen launch.prompt_data launch.workers launch.agents agents.play "
    "rewards.rule rewards.function rewards.preview rewards.judge observability.recorder "
    "observability.trackers data.rows data.prompts data.feedback rollout.fleet cluster.placement",
    "reward_test": "evaluation.reward_test rewards.rule rewards.function rewards.preview",
    "batch_inference": "evaluation.batch_inference launch.identity evaluation.runs "
    "evaluation.processes evaluation.post_processing launch.prompt_data "
    "launch.workers observability.recorder observability.trackers data.prompts data.sft "
    "data.rows data.first_look rollout.fleet cluster.placement trainers.stages workers.frozen",
    "interactive_chat": "evaluation.chat launch.prompt_data launch.settings models.loading",
    "pipeline": "launch.pipeline",
    "doctor": "doctor.examination",
    "plan": "launch.plan_command",
}
# Other names under which the modules access a section.
ALSO_CALLED = {
    "eval": {"evaluation"},
    "reward": {"flags", "rule"},
    "logger": {"config"},
    "model": {"model_config", "flags", "settings", "training"},
    "actor": {"settings", "training"},
    "kto": {"flags"},
    "critic": {"optimizer"},
}
# For flags that take effect in other modules, the test that shows the effect.
SHOWN_BY = {
    "model.ipo_enable": "config/test_derived.py::test_ipo_flag_selects_the_ipo_loss",
    "plugin": "config/test_plugins.py::test_names_and_traits_registered_by_a_plugin_are_used",
    "local_rank": "cli/test_commands.py::test_command_after_the_local_rank_flag_is_recognized",
    "rollout.remote_engines": ("config/test_derived.py::test_unused_remote_engines_get_a_notice"),
}


def other_words(flag: Flag) -> str:
    """Return arguments that set a flag to a value other than its default."""
    if flag.path in VALUES:
        return VALUES[flag.path]
    if flag.shape == "switch":
        return next(text for text, value in flag.switches.items() if value != flag.default)
    if flag.choices:
        return f"{flag.name} {next(choice for choice in flag.choices if choice != flag.default)}"
    if flag.shape == "pair":
        return f"{flag.name} 0.25 0.75"
    if flag.shape == "json":
        return flag.name + ' {"max_num_seqs":8}'
    if flag.kind is str:
        return f"{flag.name} other"
    value = flag.default + 1 if flag.kind is int and flag.default else 8
    if flag.kind is float:
        value = flag.default / 2 if flag.default else 0.5
    return f"{flag.name} {value}"


def resolved(command: str, line: str) -> tuple[Any, list[str]]:
    """Return the configuration of a minimal command line with `line` appended, and the notices."""
    words = [*LINES[command].split(), *line.split()]
    given, _ = read_flags(COMMANDS[command], words, command=command)
    return amend(COMMANDS[command](), {**given, "given": given}).resolve(command=command)


# ---- settings passed to components


def shown(value: Any) -> Any:
    """Return a comparable copy of a value in which every section is replaced by the same text."""
    if isinstance(value, Section):
        return "a section"
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: shown(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, (list, tuple)):
        return [shown(each) for each in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: shown(each) for key, each in cast(dict[Any, Any], value).items()}
    return repr(value)


def optimizer_of(section: OptimizerConfig) -> list[Any]:
    """Return an optimizer for a small module, and the learning rates of its schedule."""
    module = torch.nn.Linear(2, 2)
    optimizer = make_optimizer(module, section)
    schedule, rates = make_schedule(optimizer, section, 40), []
    for _ in range(40):
        rates.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    return [repr(optimizer), rates]


def deepspeed_of(config: Any) -> list[Any]:
    return [
        training_config(config.ds, max_norm=1.0, ranks=2),
        inference_config(config.ds),
    ]


@pytest.fixture(autouse=True)
def models_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model an empty configuration, because the command lines name no existing model."""
    monkeypatch.setattr(loading, "configuration", lambda spec: SimpleNamespace())


def given_to_all(config: Any) -> Iterator[Any]:
    """Return the settings that every component of a run receives."""
    kind = "cuda" if machine.count_gpus() else "cpu"
    if isinstance(config, SupervisedConfig):
        yield optimizer_of(config)
        yield training_config(config.ds, max_norm=config.max_norm, ranks=2)
        yield tasks.trained_spec(config), loading.pretrained_options(tasks.load_spec(config))
        yield vars(CheckpointManager(config.ckpt, [""]))
    if isinstance(config, ChatConfig):
        yield settings.load_spec(config, "m"), config.csft.suffix
    if isinstance(config, EngineCommand | PPOConfig):
        assert isinstance(config, settings.SamplingCommand)
        yield settings.reward_settings(config)
        yield loading.pretrained_options(settings.load_spec(config, "m"))
        yield inference_config(config.ds)
        yield [ErrorBudget(config.reward).max_error_rate, config.reward.fallback]
        if isinstance(config, BatchInferenceConfig):
            yield config.csft.suffix, config.data.label_key
        specs = (
            [settings.inference_sampling(config)]
            if isinstance(config, BatchInferenceConfig)
            else [settings.train_sampling(config), settings.eval_sampling(config)]
        )
        for spec in specs:
            yield (
                spec,
                spec.n_samples,
                spec.params_for(Prompt(index=0, text="", tokens=[1]), prompt_length=1),
            )
        if config.vllm.dtype != "fp16":
            tokenizer: Any = SimpleNamespace(eos_token_id=0)
            yield engine_arguments(settings.engine_settings(config, "m", kind, tokenizer), 0)
    if isinstance(config, PPOConfig):
        yield optimizer_of(config.actor)
        yield optimizer_of(config.critic)
        yield deepspeed_of(config)
        yield config.ds.sleeps  # read by the training engine
        yield training_config(config.ds, max_norm=config.actor.max_norm, ranks=2)
        yield settings.trained_settings(config, "m", 1)
        yield config.local_teacher, config.ds.lora.served_rank  # passed on by run.py
        yield MicroBatchLimits.of_training(config.train, config.ds)
        yield plan_placement(config, kind)
        yield settings.transport(config, kind)
        yield vars(ExperienceMaker(config).kl)
        yield correction_of(config.algo.advantage)
        yield clip_of(config.actor)
        yield settings.optimizer_steps(config, 5000, after=config.frozen_steps)
        if config.estimator_traits.needs_critic:
            yield training_config(config.ds, max_norm=config.critic.max_norm, ranks=2)


def everything(config: Any) -> list[Any]:
    return [shown(each) for each in given_to_all(config)]


# ---- the walk


def reason(notices: list[str], path: str) -> str:
    """Return the notices' explanation of why a flag has no effect.

    For example, returns "without --ds.zero_stage 2 or 3".
    """
    for text in notices:
        names, found, why = text.removesuffix(".").partition(": no effect ")
        if found and mentions(names, [path]):
            return why
    return ""


def followed(command: str, advice: str) -> str:
    """Return the arguments that follow the first suggestion in a notice.

    For example, "--ds.zero_stage 2 or 3" gives "--ds.zero_stage 2".
    """
    flags, first = flags_of(COMMANDS[command]), advice.partition(" or ")[0]
    if first in ASKED_FOR:
        return ASKED_FOR[first]
    name, _, value = first.partition(" ")
    path = name.removeprefix("--")
    if path not in flags or value.isupper():
        return ""
    return first if value else other_words(flags[path])


def enabling(command: str, flag: Flag, line: str) -> str:
    """Return the arguments without which, according to the notices, a flag has no effect."""
    more = ""
    while True:
        _, notices = resolved(command, f"{line} {more}")
        why = reason(notices, flag.path)
        words = (
            followed(command, why.removeprefix("without ")) if why.startswith("without ") else ""
        )
        if not words:
            return more
        assert words not in more, f"{words} does not help: {why}"
        more += f" {words}"


@pytest.mark.parametrize(("command", "path"), EVERY_FLAG)
def test_every_flag_has_an_effect_or_a_notice_reports_that_the_flag_has_no_effect(
    command: str, path: str
) -> None:
    flag = flags_of(COMMANDS[command])[path]
    evaluates = "eval.n_samples_per_prompt" in flags_of(COMMANDS[command])
    beside = (
        BESIDE.get(path, "")
        if evaluates and (command != "eval" or path == "vllm.enable_prefix_caching")
        else ""
    )
    line = f"{beside} {other_words(flag)}"
    config, notices = resolved(command, line)
    if path in dict(refusals(config)) or any(
        mentions(text, [path]) for text in config.check() if NOT_YET in text
    ):
        return
    why = reason(notices, path)
    named = re.findall(r"--([\w.]*\w)", why)
    assert [name for name in named if name not in flags_of(COMMANDS[command])] == []
    if why in ("with this command", FOR_OLDER_SCRIPTS) or (why and flag.not_yet):
        return  # the flag has no effect in the command, or its feature is not supported yet
    more = enabling(command, flag, line)
    if why and not more:
        return
    config, notices = resolved(command, f"{line} {more}")
    assert reason(notices, path) == ""
    before, _ = resolved(command, f"{beside} {more}")
    changed = everything(before) != everything(config)
    assert changed or is_read(command, path) or path in SHOWN_BY, f"{line} {more}"


def is_read(command: str, path: str) -> bool:
    """Return whether a module that receives the flag's section reads the flag."""
    section, _, leaf = path.rpartition(".")
    last = section.rpartition(".")[2] or "config"
    return any(
        (name, leaf) in attributes_read(module)
        for module in READERS[command].split()
        for name in {last} | ALSO_CALLED.get(last, set())
    )


@cache
def attributes_read(module: str) -> set[tuple[str, str]]:
    """Return the (name, attribute) pairs accessed in a module."""
    nodes = [
        node
        for node in ast.walk(package()[f"openrlhf.{module}"].tree)
        if isinstance(node, ast.Attribute)
    ]
    return {(ast.unparse(node.value).rpartition(".")[2], node.attr) for node in nodes}


@pytest.mark.parametrize("path", SHOWN_BY)
def test_every_test_listed_as_showing_a_flag_effect_exists(path: str) -> None:
    file, _, name = SHOWN_BY[path].partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()
