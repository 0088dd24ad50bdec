"""End-to-end tests from preference pairs to a reward model and PPO with a critic."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.commands import (
    column,
    default_schedule,
    kill_when,
    launch,
    numbers,
    run,
    samples,
    steps_logged,
    write_rows,
)
from tests.e2e.servers import reward_model_server
from tests.tiny import character_tokenizer, save_tiny_model

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
# Tokens whose text is tokenized to different tokens.
ONE_WAY = ("<unk>", "<bos>", "<pad>")
LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny model, prompts, and pairs whose chosen answer has more of the letter a."""
    folder = tmp_path_factory.mktemp("reward")
    draw = random.Random(0)
    save_tiny_model(folder / "model", **SIZES, vocab_size=len(character_tokenizer()))
    pairs = [
        {"prompt": f"{word}=", "chosen": "aaa<eos>", "rejected": f"{word[:3]}<eos>"}
        for word in ("".join(draw.choices(LETTERS[1:], k=5)) for _ in range(160))
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "prompts.jsonl", [{"input": row["prompt"]} for row in pairs[:32]])
    return folder


@pytest.fixture(scope="module")
def reward_model(workspace: Path) -> Path:
    """Run `train_rm` and return its folder."""
    out = workspace / "rm"
    flags = {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "pairs.jsonl",
        "data.prompt_key": "prompt",
        "data.max_len": 32,
        "train.batch_size": 16,
        "train.micro_batch_size": 16,
        "train.max_epochs": 2,
        "adam.lr": 3e-3,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "run.dir": out / "run",
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "ckpt",
        "ckpt.save_steps": 5,
        "ckpt.max_num": 4,
        "ckpt.save_hf": True,
    }
    run("train_rm", flags)
    return out


def ppo_flags(workspace: Path, reward_model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Return flags for four PPO steps with two optimizer steps each.

    The first step trains only the critic. The KL coefficient adapts to a target.
    """
    return {
        "actor.model_name_or_path": workspace / "model",
        "reward.model_name_or_path": reward_model / "model",
        "data.prompt_dataset": workspace / "prompts.jsonl",
        "data.max_len": 24,
        "rollout.max_new_tokens": 6,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 8,
        "train.micro_batch_size": 8,
        "rollout.micro_batch_size": 16,
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambd": 0.9,
        "algo.kl.init_coef": 0.01,
        "algo.kl.target": 0.001,
        "algo.kl.horizon": 100,
        "actor.adam.lr": 1e-3,
        "critic.adam.lr": 1e-3,
        "critic.freezing_steps": 1,
        "critic.save_value_network": True,
        "train.colocate_actor_ref": True,
        "train.colocate_critic_reward": True,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "ckpt.save_steps": 2,
        "run.dir": out / "run",
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "ckpt",
    } | changes


@pytest.fixture(scope="module")
def ppo(workspace: Path, reward_model: Path) -> Path:
    """Run PPO without interruption and return its folder."""
    out = workspace / "ppo"
    run("train_ppo_ray", ppo_flags(workspace, reward_model, out))
    return out


def test_reward_model_learns_which_answer_is_preferred(reward_model: Path) -> None:
    losses = column(reward_model / "run", "train/loss")
    assert losses[-1] < 0.5 * losses[0]
    assert column(reward_model / "run", "eval/acc_mean")[-1] > 0.9


def test_learning_rate_matches_the_transformers_schedule(reward_model: Path) -> None:
    assert column(reward_model / "run", "train/lr") == default_schedule(3e-3, 20)


@pytest.mark.verify
def test_ppo_learning_rates_match_the_transformers_schedule(
    workspace: Path, reward_model: Path, ppo: Path
) -> None:
    """Each batch makes two optimizer steps, and the learning rate of the second step is logged.

    The policy's schedule starts after the critic's warm-up.
    """
    assert column(ppo / "run", "train/critic_lr") == default_schedule(1e-3, 8)[1::2]
    assert column(ppo / "run", "train/actor_lr") == default_schedule(1e-3, 6)[1::2]
    unset = {
        "critic.freezing_steps": None,
        "actor.adam.lr": None,
        "critic.adam.lr": None,
        "ckpt.save_steps": None,
    }
    out = workspace / "default rates"
    run(
        "train_ppo_ray",
        ppo_flags(workspace, reward_model, out, **unset, **{"train.batch_size": 16}),
    )
    assert column(out / "run", "train/actor_lr") == default_schedule(1e-6, 4)
    assert column(out / "run", "train/critic_lr") == default_schedule(9e-6, 4)


def test_reward_mean_and_deviation_are_stored_with_the_model(reward_model: Path) -> None:
    hf = AutoModelForSequenceClassification.from_pretrained(reward_model / "model")
    assert hf.config.mean == pytest.approx(column(reward_model / "run", "eval/reward_mean")[-1])
    assert hf.config.std == pytest.approx(column(reward_model / "run", "eval/reward_std")[-1])


def test_checkpoint_from_before_the_first_evaluation_has_its_own_reward_mean_and_deviation(
    workspace: Path, reward_model: Path
) -> None:
    """The mean and deviation come from the first 100 pairs, as in a run without --eval.dataset."""
    saved = reward_model / "ckpt" / "global_step5_hf"
    hf, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(saved).eval(),
        character_tokenizer(),
    )
    pairs = [
        json.loads(line) for line in (workspace / "pairs.jsonl").read_text().splitlines()[:100]
    ]
    scores = []
    for text in (
        pair["prompt"] + pair[answer] for pair in pairs for answer in ("chosen", "rejected")
    ):
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            scores.append(hf(tokens).logits[0, 0].item())
    assert hf.config.mean == pytest.approx(statistics.fmean(scores), abs=1e-5)
    assert hf.config.std == pytest.approx(statistics.stdev(scores), abs=1e-5)


def test_rewards_of_a_model_in_rl_match_plain_transformers(reward_model: Path, ppo: Path) -> None:
    hf = AutoModelForSequenceClassification.from_pretrained(reward_model / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model / "model")
    written = [
        row for row in samples(ppo / "run") if not any(name in row["response"] for name in ONE_WAY)
    ]
    assert len(written) >= 12
    for row in written:
        tokens = tokenizer(row["prompt"] + row["response"], add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            score = hf(torch.tensor([tokens])).logits[0, 0].item()
        assert row["reward"] == pytest.approx(score, abs=1e-5)


@pytest.mark.verify
def test_served_reward_model_gives_the_same_rewards_as_a_local_one(
    workspace: Path, reward_model: Path, ppo: Path
) -> None:
    """The server packs rows, while the local reward model pads them.

    Later steps differ because the server receives text, which cannot represent some tokens.
    """
    out = workspace / "remote"
    with reward_model_server(reward_model / "model", data__max_len=24) as server:
        changes = {
            "reward.model_name_or_path": None,
            "reward.remote_url": server.url,
            "algo.advantage.estimator": "reinforce",
            "algo.advantage.lambd": None,
            "critic.freezing_steps": None,
            "critic.save_value_network": None,
            "critic.adam.lr": None,
            "train.colocate_critic_reward": None,
            "ckpt.save_steps": None,
        }
        run("train_ppo_ray", ppo_flags(workspace, reward_model, out, **changes))
        assert server.process.poll() is None
    remote, local = samples(out / "run")[:16], samples(ppo / "run")[:16]
    assert [row["response"] for row in remote] == [row["response"] for row in local]
    pairs = [
        (there["reward"], here["reward"])
        for there, here in zip(remote, local, strict=True)
        if not any(name in here["response"] for name in ONE_WAY)
    ]
    assert len(pairs) >= 4
    assert [there for there, _ in pairs] == pytest.approx([here for _, here in pairs], abs=1e-5)
    assert column(out / "run", "train/failed_episodes") == [0.0] * 4


def test_critic_warms_up_alone_before_both_models_train(ppo: Path) -> None:
    steps = [row for row in numbers(ppo / "run") if "train/critic_loss" in row]
    assert ["train/policy_loss" in row for row in steps] == [False, True, True, True]
    assert all(math.isfinite(value) for row in steps for value in row.values())
    assert steps[1]["train/kl"] == pytest.approx(0.0, abs=1e-6)  # the policy has not changed yet


def test_policy_and_critic_are_saved_and_exported(ppo: Path) -> None:
    for part in ("_actor", "_critic"):
        assert (ppo / "ckpt" / part / "global_step2").is_dir()
    AutoModelForSequenceClassification.from_pretrained(ppo / "model_critic")


def test_kl_coefficient_adapts_to_its_target(ppo: Path) -> None:
    """The coefficient changes by at most 20 % of 16 / 100 per step."""
    kl, coefficients = column(ppo / "run", "train/kl"), column(ppo / "run", "train/kl_coef")
    expected = [0.01]
    for value in kl[:-1]:
        error = min(max(value / 0.001 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * 16 / 100))
    assert coefficients == pytest.approx(expected, rel=1e-6)
    assert len(set(coefficients)) == len(coefficients)


@pytest.mark.verify
def test_killed_run_resumes_with_critic_optimizers_and_kl_coefficient(
    workspace: Path, reward_model: Path, ppo: Path
) -> None:
    """The metrics, the exported policy and the exported critic are identical to the last digit."""
    out = workspace / "killed"
    flags = ppo_flags(workspace, reward_model, out)
    kill_when(launch("train_ppo_ray", flags), lambda: steps_logged(out / "run") >= 3)
    assert steps_logged(out / "run") < 4
    run("train_ppo_ray", {**flags, "run.dir": None, "ckpt.load_enable": True})
    assert numbers(out / "run") == numbers(ppo / "run")
    assert samples(out / "run") == samples(ppo / "run")
    for name in ("model", "model_critic"):
        resumed, unbroken = (folder / name / "model.safetensors" for folder in (out, ppo))
        assert resumed.read_bytes() == unbroken.read_bytes()


@pytest.mark.verify
def test_ranks_micro_batches_and_shared_hosts_do_not_change_the_result(
    workspace: Path, reward_model: Path, ppo: Path
) -> None:
    """Actor and critic use ZeRO-3 on two ranks, and every role has its own hosts.

    Rows are padded, and micro-batches have 3 rows. The results agree to 1e-4.
    """
    out = workspace / "spread"
    changes = {
        "train.colocate_actor_ref": None,
        "train.colocate_critic_reward": None,
        "actor.num_gpus_per_node": 2,
        "critic.num_gpus_per_node": 2,
        "train.micro_batch_size": 2,
        "rollout.micro_batch_size": 3,
        "ds.packing_samples": None,
        "ds.zero_stage": 3,
        "ckpt.save_steps": None,
    }
    run("train_ppo_ray", ppo_flags(workspace, reward_model, out, **changes))
    assert [row["response"] for row in samples(out / "run")] == [
        row["response"] for row in samples(ppo / "run")
    ]
    for name in (
        "train/reward",
        "train/values",
        "train/critic_loss",
        "train/policy_loss",
        "train/kl",
        "train/return",
    ):
        assert column(out / "run", name) == pytest.approx(column(ppo / "run", name), abs=1e-4), name
    for name in ("train/actor_grad_norm", "train/critic_grad_norm"):
        assert column(out / "run", name) == pytest.approx(column(ppo / "run", name), rel=1e-3), name
