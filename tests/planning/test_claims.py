"""Tests for setups that are known to fit, or known not to fit, on a cluster."""

from __future__ import annotations

import pytest

from openrlhf.config import machine
from openrlhf.config.planning import PlanConfig
from openrlhf.launch.plan_command import print_plan
from openrlhf.planning import advice
from openrlhf.planning.cluster import parse_cluster
from openrlhf.planning.engines import cache_bytes_per_token
from openrlhf.planning.roles import EngineRole
from openrlhf.planning.shapes import shape_from_config
from openrlhf.planning.table import summary
from openrlhf.planning.usage import Instant
from openrlhf.units import GIB
from tests.planning.conftest import Configure, MakePlan
from tests.planning.models import MODELS

FULL = (
    "--ds.zero_stage 3 --train.micro_batch_size 1 --ds.packing_samples "
    "--model.gradient_checkpointing_enable"
)
RL = (
    "ppo --algo.advantage.estimator reinforce --train.colocate_all --vllm.enable_sleep "
    "--vllm.gpu_memory_utilization 0.6 --actor.gradient_checkpointing_enable "
    "--ds.packing_samples --ds.zero_stage 3 --ds.adam_offload"
)
# PPO with four 13B models on one machine, with two devices for each trained model.
# The roles are placed as in the paper's largest comparison.
PPO_13B = (
    "ppo --actor.model_name_or_path {llama2-13b} --critic.model_name_or_path {llama2-13b} "
    "--reward.model_name_or_path {llama2-13b} --algo.advantage.estimator gae "
    "--ds.zero_stage 2 --ds.adam_offload --ds.packing_samples "
    "--actor.gradient_checkpointing_enable --actor.num_gpus_per_node 2 "
    "--critic.num_gpus_per_node 2 --ref.num_gpus_per_node 1 --reward.num_gpus_per_node 1 "
    "--vllm.num_engines 1 --vllm.tensor_parallel_size 2"
)


@pytest.mark.parametrize(
    ("line", "cluster"),
    [
        (f"sft --model.model_name_or_path {{llama2-7b}} {FULL} --ds.adam_offload", "4x24GB"),
        (f"sft --model.model_name_or_path {{qwen2.5-7b}} {FULL} --ds.adam_offload", "4x24GB"),
        (f"sft --model.model_name_or_path {{codellama-34b}} {FULL} --ds.adam_offload",
         "8xA100-80GB"),
        (f"{RL} --actor.model_name_or_path {{codellama-34b}} --vllm.num_engines 4 "
         "--vllm.tensor_parallel_size 2", "8xA100-80GB"),
        (f"sft --model.model_name_or_path {{llama2-70b}} {FULL} --ds.adam_offload",
         "2x8xA100-80GB"),
        (f"{RL} --actor.model_name_or_path {{llama2-70b}} --actor.num_nodes 2 "
         "--vllm.num_engines 4 --vllm.tensor_parallel_size 4", "2x8xA100-80GB"),
        (PPO_13B, "8xA100-80GB"),
        ("sft --model.model_name_or_path {llama2-7b} --ds.lora.rank 16 --ds.load_in_4bit "
         "--train.micro_batch_size 1 --ds.packing_samples", "1x24GB"),
    ],
)  # fmt: skip
def test_published_setups_fit(plan: MakePlan, line: str, cluster: str) -> None:
    planned = plan(line, cluster)
    assert planned.shortage == ""
    assert planned.fits, planned.tightest.cause


@pytest.mark.parametrize(
    ("line", "cluster"),
    [
        (f"sft --model.model_name_or_path {{llama2-7b}} {FULL}", "1x24GB"),
        (f"sft --model.model_name_or_path {{llama2-70b}} {FULL}", "8x24GB"),
        (f"sft --model.model_name_or_path {{llama2-70b}} {FULL}", "8xA100-80GB"),
        (f"{RL} --actor.model_name_or_path {{llama2-70b}}", "8x24GB"),
        ("sft --model.model_name_or_path {llama2-7b} --ds.zero_stage 0", "8xA100-80GB"),
    ],
)
def test_setups_known_not_to_fit_do_not_fit(plan: MakePlan, line: str, cluster: str) -> None:
    assert not plan(line, cluster).fits


def test_run_that_needs_more_devices_than_the_cluster_has_does_not_fit(plan: MakePlan) -> None:
    planned = plan(PPO_13B, "4xA100-80GB")
    assert "8 devices" in planned.shortage
    assert "has 4" in planned.shortage
    assert not planned.fits


def test_adam_training_state_takes_sixteen_bytes_per_parameter(plan: MakePlan) -> None:
    """The state is a float32 gradient (4 bytes), a master weight (4) and two moments (8)."""
    planned = plan(f"sft --model.model_name_or_path {{llama2-7b}} {FULL}", "1x24GB")
    held = planned.pools[0].at(Instant.IDLE)["policy"]
    state = held.gradients + held.optimizer
    assert state / 6.738e9 == pytest.approx(16, rel=0.01)  # 4 + 4 + 8


def test_plan_reports_engine_too_small_for_its_weights(plan: MakePlan) -> None:
    line = f"{RL} --actor.model_name_or_path {{llama2-70b}} --actor.num_nodes 2"
    problems = plan(line, "2x8xA100-80GB").pools[0].problems
    assert "--vllm.gpu_memory_utilization" in problems[0]


def test_advice_for_7b_model_on_four_24_gb_devices_offloads_the_optimizer(
    configure: Configure,
) -> None:
    config = configure("sft --model.model_name_or_path {llama2-7b}", "4x24GB")
    found = advice.nearest_fit(config, parse_cluster("4x24GB"))
    assert found
    assert found.flags["ds.adam_offload"]
    assert found.plan.fits


def test_advice_for_offload_has_an_alternative_on_a_drive(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """7.6 billion weights of 20 bytes on the drive, and of 2 more with offloaded weights."""
    words = ["--model.model_name_or_path", models["qwen2.5-7b"]]
    print_plan(PlanConfig(command="sft", cluster="4x24GB"), words)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "NVMe" in line]
    assert "--ds.zero_stage 3 --ds.nvme_path /mnt/nvme. " in line
    assert "142 GiB" in line and "adam_offload" not in line
    print_plan(PlanConfig(command="sft", cluster="1x24GB"), words)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "NVMe" in line]
    assert "--ds.param_offload nvme" in line and "156 GiB" in line


def test_drive_is_advised_on_a_cpu_machine_after_cheaper_changes(
    configure: Configure, plan: MakePlan
) -> None:
    line = "sft --model.model_name_or_path {llama2-7b}"
    for cluster, has_drive in (("cpu-256GB", False), ("cpu-64GB", True)):
        config = configure(line, cluster)
        found = advice.nearest_fit(config, parse_cluster(cluster))
        assert found
        assert ("ds.nvme_path" in found.flags) == has_drive
        assert (found.plan.drive_bytes > 0) == has_drive
        assert "ds.lora.rank" not in found.flags
        assert plan(f"{line} {found.typed(config)}", cluster).fits
    large = configure("sft --model.model_name_or_path {llama2-70b}", "cpu-64GB")
    found = advice.nearest_fit(large, parse_cluster("cpu-64GB"))
    assert found and found.flags["ds.load_in_4bit"] and found.plan.drive_bytes == 0


def test_advice_prefers_pairs_of_cheap_changes_to_offload(configure: Configure) -> None:
    config = configure("sft --model.model_name_or_path {qwen2.5-7b}", "8x39GB")
    found = advice.nearest_fit(config, parse_cluster("8x39GB"))
    assert found
    assert set(found.flags) == {"model.gradient_checkpointing_enable", "ds.zero_stage"}


def test_plan_that_exceeds_only_the_reserve_states_it(plan: MakePlan) -> None:
    line = f"sft --model.model_name_or_path {{codellama-34b}} {FULL}"
    [pool] = plan(line, "8xA100-80GB").pools
    assert not pool.fits and pool.total(pool.peak) < pool.capacity
    assert "free, because predictions" in summary(plan(line, "8xA100-80GB"))
    assert "free, because predictions" not in summary(plan(line, "8xA100-40GB"))


def test_plan_for_a_cluster_does_not_need_the_memory_of_this_machines_gpus(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "cluster_gpus", 8)
    monkeypatch.setattr(machine, "gpu_memory", lambda: None)
    words = ["--model.model_name_or_path", models["qwen2.5-7b"], "--ds.zero_stage", "3"]
    print_plan(PlanConfig(command="sft", cluster="8xH200"), words)
    assert "Memory plan for 8 x H200" in capsys.readouterr().out


def test_plan_with_the_advised_flags_fits(
    configure: Configure, plan: MakePlan, models: dict[str, str]
) -> None:
    line = f"sft --model.model_name_or_path {models['llama2-70b']}"
    config = configure(line, "8xA100-80GB")
    found = advice.nearest_fit(config, parse_cluster("8xA100-80GB"))
    assert found
    assert plan(f"{line} {found.typed(config)}", "8xA100-80GB").fits


def test_advice_lowers_engine_share_if_only_the_share_is_too_large(configure: Configure) -> None:
    line = f"{RL} --actor.model_name_or_path {{llama2-7b}} --vllm.gpu_memory_utilization 0.95"
    hybrid = configure(f"{line} --vllm.num_engines 8", "8xA100-80GB")
    found = advice.nearest_fit(hybrid, parse_cluster("8xA100-80GB"))
    assert found
    assert list(found.flags) == ["vllm.gpu_memory_utilization"]


def test_engine_that_fits_on_no_machine_has_no_advice(configure: Configure) -> None:
    config = configure(f"{RL} --actor.model_name_or_path {{llama3.1-405b}}", "8x24GB")
    assert advice.nearest_fit(config, parse_cluster("8x24GB")) is None


def test_longest_length_fits_and_a_longer_length_does_not(configure: Configure) -> None:
    line = f"sft --model.model_name_or_path {{llama2-7b}} {FULL} --ds.adam_offload"
    config = configure(line, "4x24GB")
    cluster = parse_cluster("4x24GB")
    longest = advice.longest_length(config, cluster)
    assert longest > 4096
    assert longest % advice.LENGTH_STEP == 0
    for more, fits in ((0, True), (advice.LENGTH_STEP, False)):
        again = configure(f"{line} --data.max_len {longest + more}", "4x24GB")
        assert advice.make_plan(again, cluster).fits == fits


def test_device_capacity_is_in_bytes(plan: MakePlan) -> None:
    planned = plan(f"sft --model.model_name_or_path {{llama2-7b}} {FULL}", "1x24GB")
    assert planned.pools[0].capacity == 24 * GIB


def test_advice_restores_checkpointing_of_every_layer(configure: Configure) -> None:
    cluster = parse_cluster("8xA100-80GB")
    line = f"sft --model.model_name_or_path {{llama2-7b}} {FULL}"
    longest = advice.longest_length(configure(line, "8xA100-80GB"), cluster)
    every = "--model.gradient_checkpointing_every 8"
    config = configure(f"{line} {every} --data.max_len {longest}", "8xA100-80GB")
    found = advice.nearest_fit(config, cluster)
    assert found and found.flags == {"model.gradient_checkpointing_every": 1}


def test_average_of_all_weights_takes_four_bytes_per_parameter_on_every_machine(
    plan: MakePlan,
) -> None:
    line = "sft --model.model_name_or_path {llama2-7b} --ds.zero_stage 2"
    for cluster in ("8xA100-80GB", "2x8xA100-80GB"):
        without = plan(line, cluster).pools[0].host_bytes
        averaged = plan(f"{line} --train.enable_ema", cluster).pools[0].host_bytes
        assert (averaged - without) / 6.738e9 == pytest.approx(4, rel=0.001)


def test_drive_holds_twenty_bytes_per_weight_divided_over_the_machines(plan: MakePlan) -> None:
    line = "sft --model.model_name_or_path {llama2-7b} --ds.zero_stage 3 --ds.nvme_path /drive"
    for cluster, machines in (("8xA100-80GB", 1), ("2x8xA100-80GB", 2)):
        [pool] = plan(line, cluster).pools
        assert pool.host_bytes == 0
        assert pool.drive_bytes * machines / 6.738e9 == pytest.approx(20, rel=0.001)
    [pool] = plan(f"{line} --ds.param_offload nvme", "cpu-64GB").pools
    assert pool.drive_bytes / 6.738e9 == pytest.approx(22, rel=0.01)


def test_cpu_plan_has_a_process_for_each_rank_that_shares_a_sequence(plan: MakePlan) -> None:
    line = "sft --model.model_name_or_path {llama2-7b} --ds.packing_samples"
    for flag in ("--ds.tensor_parallel_size 2", "--ds.ring_attn_size 2"):
        process = plan(f"{line} {flag}", "cpu-64GB").pools[0].processes[0]
        assert process.count == 2


def test_devices_that_share_a_key_value_head_each_cache_that_head() -> None:
    """34B: 8 key-value heads of width 128, and 48 layers."""
    shape = shape_from_config(MODELS["codellama-34b"])
    head = 2 * 128 * 2  # bytes of a token's key and value in bfloat16
    for tp, devices, expected in ((4, 4, 2 * 48), (16, 16, 48), (16, 32, 24)):
        engine = EngineRole(shape=shape, tp=tp, devices=devices)
        assert cache_bytes_per_token(engine) == head * expected


def test_latent_attention_caches_one_vector_for_all_heads() -> None:
    """DeepSeek-V3, arXiv:2412.19437: 512 compressed elements and 64 of the key, in 61 layers."""
    config = MODELS["llama2-7b"] | {
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    for tp in (1, 8):
        engine = EngineRole(shape=shape_from_config(config), tp=tp, devices=tp)
        assert cache_bytes_per_token(engine) == 61 * 576 * 2


def test_engines_on_their_own_devices_get_a_smaller_memory_share(configure: Configure) -> None:
    line = (
        "ppo --actor.model_name_or_path {llama2-70b} --algo.advantage.estimator reinforce "
        "--ds.zero_stage 3 --ds.adam_offload --ds.packing_samples --train.micro_batch_size 1 "
        "--actor.gradient_checkpointing_enable --algo.kl.init_coef 0 --actor.num_nodes 4 "
        "--vllm.num_engines 1 --vllm.tensor_parallel_size 8 --vllm.gpu_memory_utilization 0.99"
    )
    cluster = "5x8xA100-80GB"
    nearest = advice.nearest_fit(configure(line, cluster), parse_cluster(cluster))
    assert nearest and list(nearest.flags) == [advice.ENGINE_SHARE]


def test_too_few_devices_are_reported_with_the_flags_that_set_them(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--actor.model_name_or_path", models["llama2-7b"], "--train.colocate_all"]
    print_plan(PlanConfig(command="ppo", cluster="1x80GB"), words)
    printed = capsys.readouterr().out
    assert "The run needs 8 devices; the cluster has 1." in printed
    assert "--actor.num_gpus_per_node" in printed
    assert "smaller model" not in printed
