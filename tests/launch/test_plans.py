"""Tests for placing the roles of launch scripts on declared clusters.

The scripts use both current and older flag names.
"""

from __future__ import annotations

import pytest

from openrlhf.cluster.placement import PlacementError
from openrlhf.cluster.ray_cluster import expected_machines
from openrlhf.config import machine
from openrlhf.config.flags import ConfigError
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.start import plan_placement

LEARNING = (
    "--pretrain org/sft --prompt_data org/prompts --input_key context_messages "
    "--apply_chat_template --zero_stage 3 --bf16 --micro_train_batch_size 4 --train_batch_size 128 "
    "--micro_rollout_batch_size 8 --rollout_batch_size 1024 --max_epochs 1 --max_len 2048 "
    "--actor_learning_rate 5e-7 --gradient_checkpointing --packing_samples --save_path out "
    "--enforce_eager --vllm_sync_backend nccl"
)
HYBRID = (
    f"{LEARNING} --reward_pretrain org/rm --critic_learning_rate 9e-6 --normalize_reward "
    "--ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 "
    "--critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 "
    "--actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 "
    "--colocate_all_models --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep "
    "--deepspeed_enable_sleep --adam_offload --ref_reward_offload --n_samples_per_prompt 2"
)
SEPARATE = (
    f"{LEARNING} --reward_pretrain org/rm --actor_num_nodes 2 --actor_num_gpus_per_node 8 "
    "--critic_num_nodes 2 --critic_num_gpus_per_node 8 --ref_num_nodes 2 --ref_num_gpus_per_node 8 "
    "--reward_num_nodes 2 --reward_num_gpus_per_node 8 --vllm_num_engines 4 "
    "--vllm_tensor_parallel_size 8 --colocate_critic_reward --colocate_actor_ref --adam_offload"
)
ASYNC = (
    "--actor.model_name_or_path org/sft --data.prompt_dataset org/prompts --reward.verifier math "
    "--data.label_key answer --algo.advantage.estimator group_norm "
    "--rollout.n_samples_per_prompt 8 --algo.advantage.is_correction_level token "
    "--train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable "
    "--train.colocate_all --actor.num_gpus_per_node 4 --vllm.num_engines 2 "
    "--vllm.tensor_parallel_size 2 --ds.zero_stage 3 --vllm.sync_backend nccl"
)


def planned(line: str, cluster: str) -> str:
    config = parse_config(
        PPOConfig,
        f"{line} --dry_run --placement.cluster {cluster}".split(),
        command="train_ppo_ray",
    )
    plan = plan_placement(config, "cuda")
    assert machine.count_gpus() == sum(machine.declared_machines(cluster))
    return plan.describe(plan.check(expected_machines(plan.on_gpus, cluster)))


def test_teacher_uses_resource_flags_of_the_reference() -> None:
    teacher = (
        "--algo.distill.teacher org/t --algo.kl.init_coef 0 --algo.advantage.estimator reinforce"
    )
    line = (
        f"--pretrain org/sft --prompt_data org/prompts {teacher} --ref_num_gpus_per_node 1".split()
    )
    config = parse_config(
        PPOConfig, [*line, "--placement.ref.resources", '{"big": 1}'], command="train_ppo_ray"
    )
    groups = {group.name: group for group in plan_placement(config, "cuda").groups}
    assert groups["teacher"].wants == {"big": 1}


def test_hybrid_script_places_all_roles_on_one_node() -> None:
    assert planned(HYBRID, "1x8") == (
        "actor, ref, critic, reward: 8 process(es): 8 on node 0\n"
        "vllm: 4 process(es), 2 GPUs each: 4 on node 0, on devices of actor, ref, critic, reward"
    )


def test_large_script_fills_whole_nodes_with_each_group() -> None:
    assert planned(SEPARATE, "8x8") == (
        "actor, ref: 16 process(es): 8 on node 0, 8 on node 1\n"
        "critic, reward: 16 process(es): 8 on node 2, 8 on node 3\n"
        "vllm: 4 process(es), 8 GPUs each: 1 on node 4, 1 on node 5, 1 on node 6, 1 on node 7"
    )


def test_asynchronous_script_gives_engines_dedicated_devices() -> None:
    assert planned(ASYNC, "1x8") == (
        "actor, ref: 4 process(es): 4 on node 0\nvllm: 2 process(es), 2 GPUs each: 2 on node 0"
    )


def test_error_for_a_cluster_that_is_too_small_states_the_number_of_gpus() -> None:
    with pytest.raises(PlacementError, match=r"64 GPUs .*56 \(7 x 8\)"):
        planned(SEPARATE, "7x8")
    with pytest.raises(
        ConfigError, match=r"--vllm\.num_engines 8 with 2 device.*--actor\.num_gpus_per_node 8"
    ):
        planned(HYBRID.replace("--vllm_num_engines 4", "--vllm_num_engines 8"), "2x8")
