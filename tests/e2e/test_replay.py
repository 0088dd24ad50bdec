"""End-to-end tests of generation and training as separate runs.

One run writes its episodes, replays train on them without engines, and a third run only generates.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf.data.errors import DataError
from openrlhf.rollout.episode_files import EpisodeFolder
from tests.e2e.commands import column, numbers, places, samples, train_here, write_rows
from tests.e2e.test_grpo import BATCH, REWARDS, SAMPLES, grpo_flags, words
from tests.tiny import HEADS, character_tokenizer, save_tiny_model, tiny_config

PROMPTS = 24
CALLED = (
    'open(__file__ + ".called", "w").close()\n'
    "def reward_func(queries, prompts, labels): raise AssertionError\n"
)


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Iterator[Path]:
    """Create a policy, a reward model and prompts, and start Ray."""
    save_tiny_model(own_folder / "policy", **HEADS)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(
        tiny_config("qwen2-tied", num_labels=1)
    ).save_pretrained(own_folder / "rm")
    character_tokenizer().save_pretrained(own_folder / "rm")
    write_rows(own_folder / "prompts.jsonl", words(PROMPTS, seed=1))
    write_rows(own_folder / "held_out.jsonl", words(5, seed=2))
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20
    )
    yield own_folder
    ray.shutdown()


def flags_of(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return flags with dynamic filtering and two rewards, one of which sometimes fails.

    Each batch makes two optimizer steps. The run evaluates and saves checkpoints.
    """
    return grpo_flags(
        workspace,
        folder,
        **{
            "actor.model_name_or_path": workspace / "policy",
            "reward.model_name_or_path": workspace / "rm",
            "reward.remote_url": REWARDS / "trouble.py",
            "reward.max_error_rate": 0.9,
            "train.batch_size": BATCH * SAMPLES // 2,
            "algo.dynamic_filtering_enable": True,
            "algo.dynamic_filtering_range": [-5, 0.5],
            "eval.dataset": workspace / "held_out.jsonl",
            "eval.steps": 2,
            "eval.n_samples_per_prompt": 1,
            "ckpt.save_steps": 2,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def written(workspace: Path) -> Path:
    """Train while writing all episodes to disk."""
    folder = workspace / "written"
    train_here(flags_of(workspace, folder, **{"rollout.dump_dir": folder / "episodes"}))
    return folder


def replay(written: Path, folder: Path, **changes: Any) -> None:
    """Train again from the run's configuration and episodes.

    The reward function must not be called.
    """
    reward = folder.with_suffix(".py")
    reward.write_text(CALLED)
    same = {"config": written / "config.yaml", **places(folder), "reward.remote_url": reward}
    train_here({**same, "rollout.replay_dir": written / "episodes", **changes})
    assert not Path(f"{reward}.called").exists()
    assert not list((folder / "logs").glob("vllm*"))


def of_training(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics logged by training steps, without evaluations."""
    return [row for row in numbers(folder) if "eval/eval_num_samples" not in row]


def test_every_episode_is_written_before_it_is_used(written: Path) -> None:
    episodes = EpisodeFolder(written / "episodes")
    steps = episodes.steps()
    assert steps == [row["step"] for row in of_training(written)] and len(steps) > 2
    every = [t for step in steps for t in episodes.read("step", step)]
    assert sorted({t.prompt.index for t in every}) == list(range(PROMPTS))
    assert len(every) == PROMPTS * SAMPLES
    assert all(
        t.num_actions and t.weight_versions == (step - 1,)
        for step in steps
        for t in episodes.read("step", step)
    )
    assert {t.failed for t in every} == {True, False}
    assert min(column(written, "train/dynamic_filtering_pass_rate")) < 100
    shown = {
        (row["prompt_index"], row["sample_index"]): row["response"] for row in samples(written)
    }
    assert (
        shown.items() <= {(t.prompt.index, t.sample_index): t.response_text for t in every}.items()
    )
    evaluated = sorted(path.name for path in (written / "episodes").glob("eval*"))
    assert evaluated == [f"eval-{step:06}.jsonl.gz" for step in sorted({*steps[1::2], steps[-1]})]
    assert len(episodes.read("eval", steps[1])) == 5


def test_replay_without_engines_or_rewards_logs_the_metrics_of_the_original_run(
    written: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replayed metrics are identical to the last digit.

    The replay first gets a folder with only two steps and ends after the second step. The replay is
    then resumed with the episodes of all steps.
    """
    folder, part = workspace / "replayed", workspace / "part"
    shutil.copytree(
        written / "episodes", part, ignore=lambda _, names: [n for n in names if n > "step-000003"]
    )
    replay(written, folder, **{"rollout.replay_dir": part})
    assert (
        "--rollout.replay_dir has episodes up to step 2; the prompts would allow 6 steps"
        in capsys.readouterr().out
    )
    assert numbers(folder) == of_training(written)[:2]
    replay(written, folder, **{"run.dir": None, "ckpt.load_enable": True, "eval.steps": 3})
    assert numbers(folder) == of_training(written)
    assert samples(folder) == samples(written)
    weights, unbroken = (path / "model" / "model.safetensors" for path in (folder, written))
    assert weights.read_bytes() == unbroken.read_bytes()


@pytest.mark.verify
def test_resumed_run_rewrites_the_episode_files_of_the_repeated_steps(
    written: Path, workspace: Path
) -> None:
    """On a CPU the rewritten files are identical. The previous files are moved aside."""
    folder = workspace / "continued"
    shutil.copytree(written, folder)
    steps = EpisodeFolder(folder / "episodes").steps()
    for name in [*folder.glob("checkpoints/*step[3-9]*"), *folder.glob("checkpoints/best*")]:
        name.unlink() if name.is_file() else shutil.rmtree(name)
    train_here(
        {
            "config": written / "config.yaml",
            **places(folder),
            "run.dir": None,
            "rollout.dump_dir": folder / "episodes",
            "ckpt.load_enable": True,
        }
    )
    assert len(list((folder / "episodes").glob("earlier/1/step*"))) == len(steps) - 2
    for path in (written / "episodes").glob("*.gz"):
        assert (folder / "episodes" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout.replay_dir": "empty"}, ["has no episodes", "--rollout.dump_dir"]),
        ({"rollout.batch_size": 8, "rollout.vllm_generate_batch_size": 8},
         ["--rollout.batch_size: was 4, now 8"]),
        ({"rollout.n_samples_per_prompt": 8}, ["--rollout.n_samples_per_prompt: was 4, now 8"]),
        ({"data.max_samples": 20}, ["prompts of --data.prompt_dataset", "was 24, ", ", now 20, "]),
        ({"data.input_template": "q{}"},
         ["prompts of --data.prompt_dataset, with --data.input_template"]),
        ({"algo.dynamic_filtering_range": [0, 0.5]},
         ["--algo.dynamic_filtering_range: was [-5.0, 0.5], now [0.0, 0.5]"]),
        ({"rollout.replay_dir": "hole"}, ["but not step 2"]),
        ({"rollout.replay_dir": "damaged"}, ["step-000001.jsonl.gz, line 2, cannot be read"]),
    ],
    ids=["empty", "batch size", "samples", "fewer prompts", "template", "filter", "hole", "damage"],
)  # fmt: skip
def test_episodes_from_a_different_run_are_rejected_at_startup(
    written: Path, workspace: Path, changes: dict[str, Any], said: list[str]
) -> None:
    for name in ("empty", "hole", "damaged"):
        shutil.copytree(written / "episodes", workspace / name, dirs_exist_ok=True)
    shutil.rmtree(workspace / "empty")
    (workspace / "empty").mkdir()
    (workspace / "hole" / "step-000002.jsonl.gz").unlink(missing_ok=True)
    with gzip.open(workspace / "damaged" / "step-000001.jsonl.gz") as file:
        head = file.readline()
    (workspace / "damaged" / "step-000001.jsonl.gz").write_bytes(gzip.compress(head + b"{\n"))
    if "rollout.replay_dir" in changes:
        changes = {"rollout.replay_dir": workspace / changes["rollout.replay_dir"]}
    with pytest.raises(DataError) as caught:
        replay(written, workspace / "never", dry_run=True, **changes)
    assert all(word in str(caught.value) for word in said), caught.value
    assert not (workspace / "never").exists()


def test_dry_run_of_a_replay_plans_no_engines(
    written: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(written, workspace / "dry", dry_run=True)
    printed = capsys.readouterr().out
    assert "actor, ref: 1 process(es)" in printed and "vllm" not in printed


def test_rollout_only_run_generates_the_episodes_of_all_steps_without_model_workers(
    written: Path, workspace: Path
) -> None:
    """The first step matches the training run's first step.

    The command does not train, but its episodes can be used for training.
    """
    folder = workspace / "generated"
    train_here(
        flags_of(
            workspace, folder, **{"rollout.only": True, "rollout.dump_dir": folder / "episodes"}
        )
    )
    first, theirs = (EpisodeFolder(path / "episodes").read("step", 1) for path in (folder, written))
    assert first == theirs
    episodes = EpisodeFolder(folder / "episodes")
    every = [t for step in episodes.steps() for t in episodes.read("step", step)]
    assert {t.weight_versions for t in every} == {(0,)} and len(every) == PROMPTS * SAMPLES
    same = (
        "rollout/reward_mean",
        "rollout/num_samples",
        "train/score",
        "train/reward_model_1",
        "train/failed_episodes",
    )
    for name in (*same, "train/dynamic_filtering_pass_rate"):
        assert column(folder, name)[0] == column(written, name)[0], name
    assert [row["step"] for row in numbers(folder)] == episodes.steps()
    assert {path.name.partition("-")[0] for path in (folder / "logs").glob("*-?.log")} == {
        "user",
        "reward",
        "vllm",
    }
    assert samples(folder) and (folder / "report.html").exists()
    assert not (folder / "model").exists() and not (folder / "checkpoints").exists()
    trained = workspace / "trained"
    train_here(flags_of(workspace, trained, **{"rollout.replay_dir": folder / "episodes"}))
    assert of_training(trained)[0] == of_training(written)[0]
    assert len(of_training(trained)) == len(episodes.steps())
