"""Unavailable features are rejected by name at startup, and available features are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import Flag, amend, flags_of
from openrlhf.config.unsupported import refusals
from tests.config.commands import ROOTS, TRAINING, violations


def other_value(flag: Flag) -> Any:
    """Return a value that is not the default."""
    if flag.shape == "switch":
        return not flag.default
    if flag.shape == "json":
        return {"node": 1}
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    value = {str: "x", int: 8, float: 0.5}[flag.kind]
    return (value, value) if flag.shape in ("pair", "list") else value


UNAVAILABLE = [
    (command, flag)
    for command, root in ROOTS.items()
    for flag in flags_of(root).values()
    if flag.not_yet
]


@pytest.mark.parametrize(
    ("command", "flag"), UNAVAILABLE, ids=lambda each: getattr(each, "path", each)
)
def test_every_unavailable_flag_is_refused_by_name(command: str, flag: Flag) -> None:
    found = list(dict(refusals(amend(ROOTS[command](), {flag.path: other_value(flag)}))).values())
    ending = f"is not available yet: {flag.not_yet}."
    assert len([t for t in found if t.startswith(f"{flag.name} ") and t.endswith(ending)]) == 1


def test_unavailable_flags_are_declared() -> None:
    assert {flag.path for _, flag in UNAVAILABLE} == {
        "ds.deepcompile", "ds.torch_compile",
        "ds.experts_implementation", "actor.freeze_visual_encoder", "use_ms",
        "data.max_images_per_prompt",
    }  # fmt: skip


SUPPORTED = [
    ("train_ppo_ray",
     "--algo.advantage.estimator gae --train.colocate_critic_reward --algo.kl.target 0.1"),
    ("train_sft",
     "--ds.zero_stage 3 --ds.packing_samples --ds.overlap_comm --ds.grad_accum_dtype fp32"),
    ("train_sft",
     "--data.apply_chat_template --data.multiturn --data.tokenizer_chat_template {{t}}"),
    ("train_sft", "--model.pretrain_mode_enable --model.gradient_checkpointing_enable"),
    ("train_sft",
     "--eval.dataset e --eval.steps 5 --ckpt.save_steps 5 --ckpt.save_hf --ckpt.load_enable"),
    ("train_sft", "--eval.dataset e --eval.patience 3"),
    ("train_ppo_ray",
     "--eval.dataset e --eval.steps 5 --eval.patience 3 --ckpt.best_metric_key eval_gsm8k_pass4"),
    ("train_sft", "--logger.tensorboard_dir t --logger.wandb.key k --run.json --dry_run"),
    ("train_sft", "--model.aux_loss_coef 0.01 --model.gradient_checkpointing_enable"),
    ("train_sft", "--ds.ring_attn_size 2 --ds.tensor_parallel_size 2 --dry_run"),
    ("train_rm", "--model.aux_loss_coef 0.01"),
    *[
        (command,
         "--ds.load_in_4bit --ds.lora.rank 8 --ds.lora.dropout 0.1 --ds.lora.rslora --ds.lora.dora")
        for command in TRAINING
    ],
    ("train_sft", "--ds.lora.rank 8 --ds.lora.target_modules q_proj v_proj --ds.zero_stage 3"),
    ("serve_rm", "--ds.load_in_4bit"),
    ("train_kto", "--train.enable_ema --train.ema_beta 0.99"),
    ("train_ppo_ray", "--actor.aux_loss_coef 0.01 --train.enable_ema --train.ema_beta 0.99"),
    ("train_sft",
     "--lr_scheduler linear --max_norm 0 --adam.weight_decay 0.1 --ds.param_dtype fp32"),
    ("train_ppo_ray", "--train.colocate_actor_ref --vllm.num_engines 3 --ds.zero_stage 0"),
    ("train_ppo_ray", "--ref.num_gpus_per_node 2 --train.max_epochs 2"),
    ("train_ppo_ray",
     "--train.dynamic_batch_enable --ds.packing_samples --actor.entropy_coef 0.01"),
    ("train_ppo_ray", "--algo.kl.use_loss --algo.kl.estimator k3 --actor.dual_clip 3"),
    ("train_ppo_ray", "--algo.loss.aggregation constant --actor.eps_clip_low_high 0.2 0.28"),
    ("train_ppo_ray", "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.1 0.9 "
     "--rollout.n_samples_per_prompt 4"),
    ("train_ppo_ray", "--reward.overlong_buffer_len 64 --reward.stop_properly_penalty_coef 0"),
    ("train_ppo_ray",
     "--rollout.top_k 20 --rollout.top_p 0.9 --rollout.seeded on --rollout.max_new_tokens 64"),
    ("train_ppo_ray",
     "--eval.dataset e --eval.steps 5 --eval.at_start --eval.n_samples_per_prompt 2"),
    ("train_ppo_ray", "--rollout.dump_dir dumped --rollout.only --rollout.batch_size 4"),
    ("train_ppo_ray", "--rollout.dump_dir dumped --rollout.replay_dir ."),
    ("serve_rm",
     "--ds.param_dtype fp16 --ds.packing_samples --batch_size 8 --truncation_side right --port 0"),
    ("train_ppo_ray", "--critic.adam.lr 1e-5 --critic.model_name_or_path c --vllm.enable_sleep"),
    *[
        ("train_ppo_ray", f"--algo.advantage.estimator {name} --rollout.n_samples_per_prompt 4")
        for name in ("reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")
    ],
    ("train_ppo_ray", "--algo.advantage.estimator flash_reinforce"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "line"), SUPPORTED)
def test_available_features_are_not_refused(command: str, line: str) -> None:
    assert violations(command, line) == []


def test_reward_function_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("")
    assert violations("train_ppo_ray", f"--reward.remote_url {file} --reward.batch") == []
