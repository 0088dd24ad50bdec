"""Settings of workers and the training loop, derived from RL flags."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import LlavaConfig

from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch import reinforcement
from openrlhf.launch.settings import (
    needs_old_logprobs,
    optimizer_steps,
    reward_settings,
    trained_settings,
)
from openrlhf.trainers.update_plan import plan_update
from openrlhf.workers.base import MicroBatchLimits
from tests.e2e.commands import as_arguments
from tests.tiny import tiny_config

ON_POLICY = {
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 2,
    "train.batch_size": 8,
    "train.micro_batch_size": 1,
    "rollout.micro_batch_size": 1,
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create model configurations without dropout, with dropout, and with nested dropout."""
    made = tmp_path_factory.mktemp("models")
    tiny_config("qwen2-tied").save_pretrained(made / "plain")
    tiny_config("qwen2-tied", attention_dropout=0.1).save_pretrained(made / "dropout")
    nested = LlavaConfig(text_config=tiny_config("qwen2-tied", attention_dropout=0.1))
    nested.save_pretrained(made / "nested dropout")
    return made


def config_of(folder: Path, model: str = "plain", **changes: Any) -> PPOConfig:
    flags = {
        "actor.model_name_or_path": folder / model,
        "data.prompt_dataset": "owner/prompts",
        "reward.verifier": "math",
        "data.label_key": "label",
        **ON_POLICY,
        **changes,
    }
    return parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray")


@pytest.mark.parametrize("packed", [False, True])
def test_only_padded_rows_are_sorted_by_length(folder: Path, packed: bool) -> None:
    config = config_of(folder, **{"ds.packing_samples": packed or None})
    training = MicroBatchLimits.of_training(config.train, config.ds)
    assert {reward_settings(config).limits.packed, training.packed} == {packed}


def test_rl_does_not_load_reward_models_in_4_bits(folder: Path) -> None:
    scored = {
        "reward.verifier": None,
        "data.label_key": None,
        "reward.process_model": folder / "plain",
    }
    four_bits = {"ds.load_in_4bit": True, "ds.lora.rank": 4}
    config = config_of(
        folder, **{**scored, **four_bits, "reward.model_name_or_path": folder / "dropout"}
    )
    judges = reward_settings(config)
    assert judges.process_model
    for spec in (*judges.models, judges.process_model):
        assert not spec.ds.load_in_4bit
    assert trained_settings(config, str(folder / "plain"), 1).load.ds.load_in_4bit


def test_batch_inference_loads_reward_model_in_4_bits(folder: Path) -> None:
    flags = {
        "task": "rm",
        "model.model_name_or_path": folder / "plain",
        "data.dataset": "owner/answers",
        "output_path": folder / "scored.jsonl",
        "ds.load_in_4bit": True,
    }
    config = parse_config(BatchInferenceConfig, as_arguments(flags), command="batch_inference")
    assert [spec.ds.load_in_4bit for spec in reward_settings(config).models] == [True]


def test_strictly_on_policy_update_needs_no_old_logprobs(folder: Path) -> None:
    assert not needs_old_logprobs(config_of(folder))
    assert not needs_old_logprobs(config_of(folder, **{"algo.kl.init_coef": 0.0}))


@pytest.mark.parametrize(
    "changes",
    [
        {"train.batch_size": 4},  # two optimizer steps per batch
        {"train.max_epochs": 2},
        {"algo.kl.use_loss": None},  # the KL penalty in the reward needs π_old
        {"model": "dropout"},  # a second forward pass would draw different dropout masks
        {"model": "nested dropout"},
    ],
    ids=str,
)
def test_old_logprobs_are_needed_unless_ratio_is_one(folder: Path, changes: dict[str, Any]) -> None:
    assert needs_old_logprobs(config_of(folder, **changes))


@given(
    prompts=st.integers(1, 20),
    steps_per_batch=st.sampled_from([1, 2, 4]),
    epochs=st.integers(1, 3),
    episodes=st.integers(1, 3),
)
@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_learning_rate_schedule_spans_all_steps_of_the_run(
    folder: Path, prompts: int, steps_per_batch: int, epochs: int, episodes: int
) -> None:
    changes = {
        "train.batch_size": 8 // steps_per_batch,
        "train.max_epochs": epochs,
        "train.num_episodes": episodes,
    }
    config = config_of(folder, **changes)
    drawn = [min(4, prompts - first) for first in range(0, prompts, 4)] * episodes
    plans = [
        plan_update([3] * 2 * n, slices=1, batch_size=8 // steps_per_batch, epochs=epochs, seed=0)
        for n in drawn
    ]
    assert optimizer_steps(config, prompts) == sum(len(plan.steps) for [plan] in plans)


@pytest.mark.parametrize(("flag", "frozen"), [(None, 0), (-1, 0), (0, 0), (2, 2)])
def test_policy_schedule_excludes_critic_only_steps(
    folder: Path, flag: int | None, frozen: int
) -> None:
    """Each batch has one optimizer step. A schedule shorter than the run would start over."""
    config = config_of(folder, **{"algo.advantage.estimator": "gae", "critic.freezing_steps": flag})
    assert config.frozen_steps == frozen
    assert optimizer_steps(config, 40, after=config.frozen_steps) == 10 - frozen


@pytest.mark.parametrize(
    ("asynchronous", "steps", "sizes"), [(True, 5, [4] * 5), (False, 6, [4, 4, 2] * 2)]
)
def test_dry_run_prints_number_of_steps(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool, steps: int, sizes: list[int],
) -> None:  # fmt: skip
    """Asynchronous batches extend into the next epoch, so no batch is incomplete."""
    config = config_of(
        folder, **{"train.async_enable": asynchronous or None, "train.num_episodes": 2}
    )
    monkeypatch.setattr(reinforcement, "show_prompts", lambda *_: None)
    plan: Any = SimpleNamespace(on_gpus=False, check=lambda _: {}, describe=lambda _: "")
    data: Any = SimpleNamespace(train=range(10))
    reinforcement.show_plan(config, data, plan, memory=None)
    assert f"10 prompts, {steps} step(s) of 4 prompts" in capsys.readouterr().out
    assert config.step_sizes(10) == sizes
