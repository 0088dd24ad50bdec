"""End-to-end tests of asynchronous training.

Samples come from older weights, and every prompt is trained on exactly once, even after a kill.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray

from openrlhf.observability.run_folder import read_lines
from openrlhf.rollout.episode_files import EpisodeFolder
from tests.checkpoints.kept import checkpoints_in
from tests.e2e.commands import (
    column,
    kill_when,
    launch,
    numbers,
    samples,
    small_grpo,
    steps_logged,
    train_here,
    write_rows,
)
from tests.tiny import HEADS, save_reward_model, save_tiny_model

REWARDS = Path(__file__).parent / "reward_files"
PROMPTS, BATCH, SAMPLES, EPOCHS = 22, 4, 2, 2
STEPS = -(-PROMPTS * EPOCHS // BATCH)


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    save_tiny_model(own_folder / "model", **HEADS)
    draw = random.Random(1)
    rows = [
        {"input": "".join(draw.choices("bcdefgh", k=4)) + f"{number:02}="}
        for number in range(PROMPTS)
    ]
    write_rows(own_folder / "prompts.jsonl", rows)
    return own_folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
    )
    yield
    ray.shutdown()


def flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return flags for eleven steps of four prompts with two episodes of two turns each."""
    return {
        **small_grpo(workspace, folder, prompts=BATCH, samples=SAMPLES),
        "data.max_len": 40,
        "train.agent_func_path": REWARDS / "waiting_agent.py",
        "train.async_enable": True,
        "train.async_queue_size": 2,
        "train.num_episodes": EPOCHS,
        "algo.advantage.is_correction_level": "token",
        "actor.adam.lr": 1e-3,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        **changes,
    }


def lags(folder: Path) -> list[int]:
    """Return each sample's lag: the step's weight version minus that of the first token."""
    return [row["step"] - 1 - min(row["weight_versions"]) for row in samples(folder)]


def check_every_prompt_was_trained_on_once(folder: Path, prompts: int = PROMPTS) -> None:
    rows, steps = samples(folder), prompts * EPOCHS // BATCH
    episodes = Counter((row["prompt_index"], row["sample_index"]) for row in rows)
    assert set(episodes.values()) == {1}
    assert {index for index, _ in episodes} == set(range(prompts * EPOCHS))
    assert Counter(row["step"] for row in rows) == dict.fromkeys(
        range(1, steps + 1), BATCH * SAMPLES
    )


@pytest.mark.usefixtures("cluster")
def test_samples_in_progress_continue_with_new_weights_within_the_staleness_limit(
    workspace: Path,
) -> None:
    folder = workspace / "partial"
    train_here(
        flags(workspace, folder, **{"train.partial_rollout_enable": True, "train.max_staleness": 4})
    )
    check_every_prompt_was_trained_on_once(folder)
    assert {1, 2} <= set(lags(folder)) <= {0, 1, 2, 3, 4}
    assert any(len(row["weight_versions"]) > 1 for row in samples(folder))
    for step, row in enumerate(numbers(folder), 1):
        mine = [
            lag
            for lag, sample in zip(lags(folder), samples(folder), strict=True)
            if sample["step"] == step
        ]
        assert row["rollout/lag_mean"] == pytest.approx(sum(mine) / len(mine))
        assert row["rollout/lag_max"] == max(mine)
        assert (
            row["rollout/lag_1"] == pytest.approx(mine.count(1) / len(mine))
            if 1 in mine
            else "rollout/lag_1" not in row
        )
    timing = [row for row in read_lines(folder / "metrics.jsonl")]
    assert any(row["timing/models_overlap"] > 0 for row in timing)
    assert all(
        0 <= row["timing/engines_idle"] <= 1 and 0 <= row["timing/models_idle"] <= 1
        for row in timing
    )
    assert max(column(folder, "train/vllm_kl")) < 0.1


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_every_sample_has_a_single_weight_version_without_partial_rollouts(workspace: Path) -> None:
    folder = workspace / "whole"
    train_here(flags(workspace, folder, **{"train.async_queue_size": 1, "data.max_samples": 12}))
    assert {len(row["weight_versions"]) for row in samples(folder)} == {1}
    assert set(lags(folder)) == {0, 1}
    assert lags(folder).count(0) == BATCH * SAMPLES  # only samples of step 1 have no lag


@pytest.mark.usefixtures("cluster")
@pytest.mark.verify
def test_flash_reinforce_masks_stale_answers_whose_divergence_exceeds_the_threshold(
    workspace: Path,
) -> None:
    folder = workspace / "flash"
    changes = {
        "algo.advantage.estimator": "flash_reinforce",
        "rollout.n_samples_per_prompt": 1,
        "train.batch_size": BATCH,
        "train.num_episodes": 1,
        "train.partial_rollout_enable": True,
        "data.max_samples": 4 * BATCH,
        "algo.advantage.is_correction_level": "seq",
        "algo.advantage.is_correction_gating": "binary_kl",
        "algo.advantage.is_correction_threshold": 1e-8,  # far above rounding errors in float32
        "algo.kl.unbiased_gradient": True,
    }
    train_here(flags(workspace, folder, **changes))
    masked = column(folder, "train/is_filter_ratio")
    assert len(masked) == 4
    assert masked[0] == 0
    assert max(masked) > 0, "some samples are older than the first update"
    assert {share * BATCH for share in masked} <= {0, 1, 2, 3, 4}


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_rejected_prompts_are_replaced_during_training(workspace: Path) -> None:
    folder = workspace / "filtered"
    changes = {
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": [0.01, 0.2],
        "train.partial_rollout_enable": True,
    }
    train_here(flags(workspace, folder, **changes))
    counted = [row["rollout/num_samples"] for row in numbers(folder)]
    assert set(counted[:-1]) == {BATCH * SAMPLES} and len(counted) < STEPS
    assert {row["prompt_index"] for row in samples(folder)} == set(range(PROMPTS * EPOCHS))


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_models_score_a_prompt_in_parallel_while_other_prompts_are_still_sampled(
    workspace: Path,
) -> None:
    """The agent finishes no other prompt until models have started to score the first prompt.

    Therefore, a run that scored only complete batches would never end.
    """
    folder = workspace / "side-by-side"
    plugin, agent = (folder / "user" / name for name in ("slow_scores.py", "patient_agent.py"))
    shutil.copytree(REWARDS.parent / "plugin_files", plugin.parent)
    roles = {
        "critic.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "reward.num_gpus_per_node": 1,
    }
    changes = {
        "plugin": plugin,
        "train.agent_func_path": agent,
        "train.async_queue_size": 1,
        "data.max_samples": 8,
        "reward.model_name_or_path": save_reward_model(folder / "rm", workspace / "model"),
        "algo.advantage.estimator": "gae",
        **roles,
    }
    train_here(flags(workspace, folder, **changes))
    spans = [json.loads(line) for line in (plugin.parent / "spans.jsonl").read_text().splitlines()]
    by_role = [
        [span for span in spans if span["role"] == f"{role}Worker"]
        for role in ("Reference", "Critic", "Reward")
    ]
    assert [len(spans) for spans in by_role] == [16] * 3  # groups
    together = [
        trio
        for trio in product(*by_role)
        if max(s["began"] for s in trio) < min(s["ended"] for s in trio)
    ]
    assert len({trio[0]["began"] for trio in together}) >= 8
    assert any(row["timing/models_overlap"] > 0 for row in read_lines(folder / "metrics.jsonl"))


@pytest.mark.verify
@pytest.mark.usefixtures("cluster")
def test_resumed_run_trains_on_samples_that_were_waiting_when_it_was_killed(
    workspace: Path,
) -> None:
    folder, prompts = workspace / "killed", 12
    changes = {
        "train.partial_rollout_enable": True,
        "ckpt.save_steps": 1,
        "data.max_samples": prompts,
    }
    settings = flags(workspace, folder, **changes)
    kill_when(launch("train_ppo_ray", settings), lambda: steps_logged(folder) >= 2)
    newest = checkpoints_in(folder / "checkpoints", parts=("_actor", "_source")).latest()
    assert newest
    step = newest.state.step
    waited = EpisodeFolder(Path(newest.engine_dir("_source")) / newest.tag).read("step", step)
    assert waited
    train_here({**settings, "ckpt.load_enable": True})
    check_every_prompt_was_trained_on_once(folder, prompts)
    after = {
        (row["prompt_index"], row["sample_index"]): row
        for row in samples(folder)
        if row["step"] > step
    }
    for episode in waited:
        row = after[episode.prompt.index, episode.sample_index]
        assert (row["response"], row["weight_versions"]) == (
            episode.response_text,
            list(episode.weight_versions),
        )
