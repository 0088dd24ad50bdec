"""Tests for values derived from flags, and for the notices about the derived values."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config import machine
from openrlhf.config.flags import amend, flags_of, value_at
from openrlhf.config.groups import role_groups
from openrlhf.config.machine import has_quick_bfloat16  # before conftest.py patches the function
from openrlhf.config.optimizer import SCHEDULERS
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.shared import CheckpointConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.training.ds_config import training_config
from tests.config.commands import ROOTS, SMALLEST, parse, ppo, sft, violations

Explicit = frozenset[str]


def resolved(config: Any, *explicit: str) -> tuple[Any, str]:
    """Resolve a configuration built in code, which may set flags that commands reject.

    Flags in `explicit` count as given by the user.
    """
    given = {path: value_at(config, path) for path in explicit}
    config, notices = amend(config, {"given": given}).resolve(command="train")
    return config, "\n".join(notices)


def rl(**values: Any) -> PPOConfig:
    """Return an RL configuration with values given by path; two underscores stand for a dot."""
    return amend(PPOConfig(), {path.replace("__", "."): value for path, value in values.items()})


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray"])
def test_run_folder_name_contains_start_time_and_process_id(command: str) -> None:
    """Commands that start in the same second use different folders."""
    config = parse_config(ROOTS[command], SMALLEST[command].split(), command=command)
    assert re.fullmatch(rf"\./runs/{command}-\d{{8}}-\d{{6}}-{os.getpid()}", config.run.dir)
    assert config.logger.wandb.run_name is None


def test_given_run_folder_and_run_name_are_kept() -> None:
    config = sft("--run.dir here --logger.wandb.run_name mine")
    assert (config.run.dir, config.logger.wandb.run_name) == ("here", "mine")


def test_interval_of_minus_one_is_kept_and_means_never() -> None:
    assert (sft().ckpt.save_steps, sft().eval.steps) == (-1, -1)


def test_input_template_without_braces_is_dropped_with_a_notice() -> None:
    config, notices = resolved(rl(data__input_template="Question:"), "data.input_template")
    assert config.data.input_template is None
    assert "--data.input_template 'Question:' is ignored: it has no {}" in notices


def test_input_template_with_a_literal_backslash_n_is_kept_with_a_notice() -> None:
    config, notices = resolved(rl(data__input_template=r"Q: {}\nA: "))
    assert config.data.input_template == r"Q: {}\nA: "
    assert "not a line break" in notices
    assert "not a line break" not in resolved(SFTConfig())[1]


# Data type


def test_cpu_without_avx512_gets_a_notice_that_bfloat16_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_machine: Any
) -> None:
    cpu = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "CPU_INFO", cpu)
    monkeypatch.setattr(machine, "has_quick_bfloat16", has_quick_bfloat16)
    cpu.write_text("flags : avx avx2 avx512bw")
    assert "AVX-512" not in resolved(SFTConfig())[1]
    cpu.write_text("flags : avx avx2")
    assert "--ds.param_dtype bf16 is 5 to 20 times slower" in resolved(SFTConfig())[1]
    assert "AVX-512" not in resolved(amend(SFTConfig(), {"ds.param_dtype": "fp32"}))[1]
    gpu_machine(1)
    assert "AVX-512" not in resolved(SFTConfig())[1]


# Attention


def test_without_a_gpu_sdpa_is_used_with_a_notice_only_if_flash_attention_was_requested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sft().ds.attn_implementation == "sdpa"
    assert "sdpa" not in capsys.readouterr().err
    assert sft("--ds.attn_implementation flash_attention_2").ds.attn_implementation == "sdpa"
    assert (
        "Using --ds.attn_implementation sdpa instead of flash_attention_2: there is no GPU"
        in capsys.readouterr().err
    )


def test_attention_is_flash_attention_if_a_gpu_and_the_package_exist(gpu_machine: Any) -> None:
    gpu_machine(1)
    assert sft().ds.attn_implementation == "flash_attention_2"
    assert sft("--ds.param_dtype fp32").ds.attn_implementation == "sdpa"


def test_requested_flash_attention_falls_back_with_a_notice_if_the_package_is_missing(
    gpu_machine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_machine(1, flash_attention=False)
    assert sft().ds.attn_implementation == "sdpa"
    assert capsys.readouterr().err == ""
    for asked in (
        "--ds.attn_implementation flash_attention_2",
        "--flash_attn",
        "--ds.packing_samples --flash_attn",
    ):
        assert sft(asked).ds.attn_implementation == "sdpa"
        assert (
            "sdpa instead of flash_attention_2: the package flash-attn is not installed"
            in capsys.readouterr().err
        )
    assert (
        sft("--ds.attn_implementation flash_attention_3").ds.attn_implementation
        == "flash_attention_3"
    )


def test_attention_given_by_the_user_is_kept() -> None:
    assert sft("--ds.attn_implementation eager").ds.attn_implementation == "eager"


def test_packing_replaces_attention_that_cannot_separate_samples(gpu_machine: Any) -> None:
    chosen = "--ds.packing_samples --ds.attn_implementation"
    assert sft(f"{chosen} sdpa").ds.attn_implementation == "sdpa"
    assert sft(f"{chosen} eager").ds.attn_implementation == "sdpa"
    gpu_machine(1)
    assert sft(f"{chosen} eager").ds.attn_implementation == "flash_attention_2"


# SFT


def test_batch_smaller_than_the_default_micro_batch_is_one_micro_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--train.batch_size 4").train.micro_batch_size == 4
    assert "--train.micro_batch_size is 4" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sft("--train.batch_size 4").train.micro_batch_size == 2
    assert sft("--train.batch_size 32").train.micro_batch_size == 8


def test_checkpoints_without_content_get_a_notice() -> None:
    _, notices = resolved(SFTConfig(ckpt=SFTConfig().ckpt.__class__(save_steps=5, disable_ds=True)))
    assert "--ckpt.save_steps saves nothing" in notices


def test_new_run_gets_a_notice_about_checkpoints_that_it_will_replace(tmp_path: Path) -> None:
    def said(**flags: Any) -> str:
        return resolved(SFTConfig(ckpt=CheckpointConfig(path=str(tmp_path), **flags)))[1]

    assert "from an earlier run" not in said(save_steps=5)
    (tmp_path / "global_step5.manifest.json").touch()
    assert f"--ckpt.path {tmp_path} has checkpoints from an earlier run" in said(save_steps=5)
    assert "from an earlier run" not in said() + said(save_steps=5, load_enable=True)


def test_chat_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    chats = "--data.apply_chat_template --data.tokenizer_chat_template"
    assert sft(f"{chats} {file}").data.tokenizer_chat_template == "{{ messages }}"
    assert sft(f"{chats} {{{{messages}}}}").data.tokenizer_chat_template == "{{messages}}"
    (sentence,) = violations("train_sft", f"{chats} gone.jinja")
    assert "--data.tokenizer_chat_template gone.jinja is neither a template" in sentence


# RL


def test_group_size_defaults_to_one_process_without_gpu() -> None:
    config, notices = resolved(rl(actor__num_gpus_per_node=2), "actor.num_gpus_per_node")
    assert (config.actor.num_gpus_per_node, config.ref.num_gpus_per_node) == (2, 1)
    assert "There is no GPU" in notices and "--actor.num" not in notices


def test_group_size_defaults_to_eight_on_a_gpu_machine(gpu_machine: Any) -> None:
    gpu_machine(8)
    config, notices = resolved(rl())
    assert config.actor.num_gpus_per_node == config.reward.num_gpus_per_node == 8
    assert "No GPU" not in notices


NO_PROCESSES = "--{0}_num_nodes 0 --{0}_num_gpus_per_node 0"


@pytest.mark.parametrize("role", ["ref", "critic", "reward"])
@pytest.mark.parametrize("sharing", ["", "--colocate_actor_ref", "--colocate_all_models"])
def test_role_without_a_model_may_have_no_processes(role: str, sharing: str) -> None:
    line = f"{NO_PROCESSES.format(role)} {sharing} --init_kl_coef 0"
    config = ppo(line)
    assert config.actor.num_nodes == config.actor.num_gpus_per_node == 1
    assert role not in [name for group in role_groups(config) for name in group.roles]


@pytest.mark.parametrize(
    ("role", "model"),
    [
        ("actor", ""),
        ("ref", "--init_kl_coef 0.1"),
        ("critic", "--advantage_estimator gae"),
        ("reward", "--reward_pretrain r"),
    ],
)
def test_role_with_a_model_needs_processes(role: str, model: str) -> None:
    found = violations("train_ppo_ray", f"{NO_PROCESSES.format(role)} {model}")
    assert f"--{role}.num_nodes is 0, but it must be at least 1." in found


def test_colocated_roles_have_the_same_size(gpu_machine: Any) -> None:
    gpu_machine(8)
    given = rl(actor__num_gpus_per_node=4, train__colocate_actor_ref=True)
    config, _ = resolved(given, "actor.num_gpus_per_node")
    assert (config.ref.num_gpus_per_node, config.reward.num_gpus_per_node) == (4, 8)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", (0.2, 0.2)),
        ("--actor.eps_clip 0.1", (0.1, 0.1)),
        ("--actor.eps_clip_low_high 0.2 0.28", (0.2, 0.28)),
        ("--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.28", (0.2, 0.28)),
    ],
)
def test_clip_range_has_a_lower_and_an_upper_bound(
    line: str, expected: tuple[float, float]
) -> None:
    assert ppo(line).actor.eps_clip_low_high == expected


def test_unused_eps_clip_gets_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    ppo("--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.28")
    assert "--actor.eps_clip has no effect" in capsys.readouterr().err


def test_unused_remote_engines_get_a_notice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("")
    monkeypatch.chdir(tmp_path)
    engines = "--rollout.remote_engines http://h:8000/v1 judge=https://h/v1 --reward.retries 2"
    assert ppo(f"{engines} --algo.distill.teacher judge").remote_teacher == "judge"
    config = ppo(f"{engines} --reward.remote_url reward.py")
    assert config.rollout.named_engines == [("0", "http://h:8000/v1"), ("judge", "https://h/v1")]
    assert "no effect" not in capsys.readouterr().err
    ppo(engines)
    said = (
        "--rollout.remote_engines: no effect without --train.agent_func_path or "
        "--reward.remote_url FILE.py or"
    )
    assert said in capsys.readouterr().err


def test_cispo_without_clip_flags_has_no_lower_clip() -> None:
    given = rl(actor__policy_loss_type="cispo", actor__eps_clip=0.1)
    assert resolved(given)[0].actor.eps_clip_low_high == (1.0, 0.28)
    assert resolved(given, "actor.eps_clip")[0].actor.eps_clip_low_high == (0.1, 0.1)


def test_gspo_defaults_to_sequence_aggregation_and_recommends_a_small_clip_range() -> None:
    config, notices = resolved(rl(actor__policy_loss_type="gspo"))
    assert config.algo.loss.aggregation == "sequence"
    assert "3e-4 4e-4" in notices
    config, notices = resolved(
        rl(actor__policy_loss_type="gspo", actor__eps_clip=3e-4),
        "actor.eps_clip",
        "algo.loss.aggregation",
    )
    assert config.algo.loss.aggregation == "token"
    assert "gspo" not in notices


def test_agent_replaces_the_reward_function() -> None:
    config, notices = resolved(
        rl(train__agent_func_path="a.py", reward__remote_url="r.py"), "reward.remote_url"
    )
    assert config.reward.remote_url is None
    assert "--reward.remote_url: no effect with --train.agent_func_path" in notices


def test_critic_is_initialized_from_reward_model_or_policy() -> None:
    models = {"actor__model_name_or_path": "m", "algo__advantage__estimator": "gae"}
    critics = [
        resolved(rl(**models))[0].critic,
        resolved(rl(**models, reward__model_name_or_path="r1, r2"))[0].critic,
        resolved(rl(**models, critic__model_name_or_path="c"))[0].critic,
    ]
    assert [critic.model_name_or_path for critic in critics] == ["m", "r1", "c"]


def test_estimators_other_than_gae_have_no_critic(capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo("--critic.model_name_or_path c").critic.model_name_or_path is None
    assert "--critic.model_name_or_path: no effect without a critic" in capsys.readouterr().err


@pytest.mark.parametrize(
    "estimator", ["rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"]
)
def test_estimators_that_compare_episodes_ignore_gamma(
    estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"--algo.advantage.estimator {estimator} --rollout.n_samples_per_prompt 2"
    assert ppo(f"{line} --algo.advantage.gamma 0.9").algo.advantage.gamma == 1.0
    assert (
        f"--algo.advantage.gamma: no effect with --algo.advantage.estimator {estimator}."
        in capsys.readouterr().err
    )


def test_reinforce_uses_gamma() -> None:
    assert ppo("--algo.advantage.gamma 0.9").algo.advantage.gamma == 0.9


def test_generation_only_run_lists_the_training_flags_without_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unused = (
        "--actor.adam.lr 1 --algo.kl.init_coef 0.1 --ckpt.load_enable --eval.dataset e "
        "--train.batch_size 8"
    )
    config = ppo(
        f"--rollout.only {unused} --rollout.batch_size 3 --train.seed 1 "
        "--algo.dynamic_filtering_range 0 1"
    )
    said = capsys.readouterr().err
    idle = (
        "--actor.adam.lr, --algo.kl.init_coef, --ckpt.load_enable, --eval.dataset, "
        "--train.batch_size"
    )
    assert f"{idle}: no effect with --rollout.only." in said
    assert "optimizer step" not in said and "No GPU" not in said
    assert not config.ckpt.load_enable
    ppo(
        "--rollout.only "
        + unused
        + " --actor.entropy_coef 0 --actor.eps_clip 0.1 --critic.value_clip 1 --ref.num_nodes 2"
    )
    said = capsys.readouterr().err
    assert "--actor.adam.lr, --actor.entropy_coef," in said and "--train.batch_size: no" in said


def test_replay_needs_no_reward_and_lists_the_engine_flags_without_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ppo(
        "--rollout.replay_dir . --vllm.num_engines 2 --eval.dataset e "
        "--rollout.dump_dir dumped --reward.clip_range -1 1"
    )
    said = capsys.readouterr().err
    idle = "--eval.dataset, --reward.verifier, --rollout.dump_dir, --vllm.num_engines"
    assert f"{idle}: no effect with --rollout.replay_dir." in said
    without = rl(rollout__replay_dir=".", algo__advantage__estimator="reinforce")
    assert not [text for text in resolved(without)[0].check() if "samples have no reward" in text]


def test_unset_counts_follow_the_flags_that_they_default_to() -> None:
    config = ppo("--rollout.batch_size 256 --vllm.num_engines 2")
    assert config.rollout.vllm_generate_batch_size == 256
    assert config.vllm.max_engines == 2
    assert config.train.max_staleness == 1
    assert config.reward.workers >= 1
    assert resolved(rl(train__async_queue_size=3))[0].train.max_staleness == 3


def test_dynamic_batches_enable_packing_and_share_their_token_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ppo("--train.dynamic_batch_enable --train.max_tokens_per_gpu 4096")
    assert config.ds.packing_samples
    assert config.rollout.max_tokens_per_gpu == 4096
    assert "--train.dynamic_batch_enable turns on --ds.packing_samples" in capsys.readouterr().err
    assert ppo().rollout.max_tokens_per_gpu is None
    assert not ppo().ds.packing_samples


def test_engine_dtype_defaults_to_the_dtype_of_the_weights() -> None:
    assert ppo().vllm.dtype == "bf16"
    assert ppo("--ds.param_dtype fp32").vllm.dtype == "fp32"
    assert ppo("--ds.param_dtype fp32 --vllm.dtype bf16").vllm.dtype == "bf16"


def test_prefix_caching_is_enabled_if_prompts_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    assert not ppo().vllm.enable_prefix_caching
    assert ppo("--vllm.enable_prefix_caching").vllm.enable_prefix_caching
    assert ppo("--rollout.n_samples_per_prompt 2").vllm.enable_prefix_caching
    off = "--vllm.disable_prefix_caching"
    assert not ppo(f"--rollout.n_samples_per_prompt 2 {off}").vllm.enable_prefix_caching
    assert "no effect" not in capsys.readouterr().err
    assert not ppo(f"--vllm.enable_prefix_caching {off}").vllm.enable_prefix_caching
    assert "no effect with --vllm.disable_prefix_caching" in capsys.readouterr().err
    assert resolved(rl(train__agent_func_path="a.py"))[0].vllm.enable_prefix_caching


def test_samples_are_seeded_without_a_gpu(gpu_machine: Any) -> None:
    assert ppo().rollout.seeded == "on"
    assert ppo("--rollout.seeded off").rollout.seeded == "off"
    gpu_machine(8)
    assert resolved(rl())[0].rollout.seeded == "off"


def test_second_copy_of_the_weights_has_no_effect_below_zero_3() -> None:
    config, notices = resolved(rl(ds__zpg=30, ds__tensor_parallel_size=4), "ds.zpg")
    assert config.ds.ranks_per_copy == 1
    assert "zero_hpz_partition_size" not in str(training_config(config.ds, max_norm=1.0, ranks=4))
    assert "--ds.zpg: no effect without --ds.zero_stage 3." in notices
    assert resolved(rl(ds__zpg=8, ds__zero_stage=3))[0].ds.ranks_per_copy == 8


def test_engines_sleep_only_if_they_share_devices() -> None:
    config, notices = resolved(rl(vllm__enable_sleep=True), "vllm.enable_sleep")
    assert not config.vllm.enable_sleep
    assert "--vllm.enable_sleep: no effect without --train.colocate_all." in notices
    assert resolved(rl(vllm__enable_sleep=True, train__colocate_all=True))[0].vllm.enable_sleep


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (
            "--algo.kl.use_loss",
            "--algo.kl.estimator k1 has a zero expected gradient as a loss",
        ),
        (
            "--algo.kl.estimator k3",
            "--algo.kl.estimator k3 is meant for --algo.kl.use_loss",
        ),
        ("--algo.kl.use_loss --algo.kl.estimator k2", ""),
        (
            "--algo.kl.estimator k3 --algo.kl.init_coef 0",
            "--algo.kl.estimator: no effect without --algo.kl.init_coef",
        ),
        ("", ""),
    ],
)
def test_notice_recommends_a_suitable_kl_estimator(
    line: str, notice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo(line)
    printed = capsys.readouterr().err
    assert notice in printed
    assert bool(notice) == ("--algo.kl" in printed)


@pytest.mark.parametrize("cut", ["top_p 0.9", "top_k 5"])
def test_truncated_sampling_distribution_gets_a_notice(
    cut: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo(f"--rollout.{cut}")
    assert (
        "the engine's log-probabilities come from the truncated distribution and the trainer's"
        in capsys.readouterr().err
    )
    ppo("")
    assert "truncated distribution" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["--algo.kl.init_coef 0 --train.colocate_actor_ref", "--ds.lora.rank 8 --ref.offload"]
)
def test_notice_about_unused_reference_flags_explains_how_to_load_a_reference(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo(line)
    said = (
        "no effect without a reference (--algo.kl.init_coef above 0, no --ds.lora.rank) or "
        "--algo.distill.teacher PATH."
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_min_lr_ratio_has_an_effect_only_in_schedules_with_a_minimum(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sft(f"--lr_scheduler {schedule} --min_lr_ratio 0.5")
    floored = "min_lr" in schedule or schedule == "warmup_stable_decay"
    assert ("--min_lr_ratio: no effect" in capsys.readouterr().err) != floored


def test_image_column_has_an_effect_only_with_an_agent(capsys: pytest.CaptureFixture[str]) -> None:
    assert flags_of(PPOConfig)["data.max_images_per_prompt"].not_yet
    assert not flags_of(PPOConfig)["data.image_key"].not_yet
    ppo("--data.image_key photos")
    assert "--data.image_key: no effect without --train.agent_func_path." in capsys.readouterr().err


def test_evaluation_that_never_runs_gets_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    ppo("--eval.dataset other")
    assert "--eval.dataset is never used" in capsys.readouterr().err
    ppo("--eval.dataset other --eval.at_start")
    assert "--eval.dataset" not in capsys.readouterr().err


def test_iteration_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ppo("--rollout.batch_size 64 --rollout.n_samples_per_prompt 4 --train.max_epochs 2")
    assert (
        "64 prompts x 4 = 256 samples, 4 optimizer step(s) of 128 on 1 rank(s)"
        in capsys.readouterr().err
    )


def test_quantized_weights_get_a_notice_unless_the_loss_is_corrected() -> None:
    assert (
        "samples come from quantized weights"
        in resolved(rl(vllm__quantization="fp8_per_channel"))[1]
    )
    corrected = rl(
        vllm__quantization="fp8_per_channel", algo__advantage__is_correction_level="token"
    )
    assert "quantized weights" not in resolved(corrected)[1]


def test_server_that_other_machines_can_reach_gets_a_notice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse("serve_rm", "--host 0.0.0.0")
    assert (
        "--host 0.0.0.0: anyone who can reach this address can use the server"
        in capsys.readouterr().err
    )
    parse("serve_rm")
    assert "For trainers on other nodes, use --host 0.0.0.0" in capsys.readouterr().err
    parse("serve_rm", "--host 0.0.0.0")
    assert "other nodes" not in capsys.readouterr().err


def test_server_forward_pass_fits_the_longest_text() -> None:
    assert parse("serve_rm").max_batch_tokens == 16192
    assert parse("serve_rm", "--max_len 32768").max_batch_tokens == 32768


def test_server_uses_an_attention_implementation_that_works_on_this_machine() -> None:
    assert parse("serve_rm").ds.attn_implementation == "sdpa"


@pytest.mark.parametrize("command", ROOTS)
def test_resolve_is_idempotent(command: str) -> None:
    config = parse_config(ROOTS[command], SMALLEST[command].split(), command=command)
    assert config.resolve(command=command)[0] == config


def test_ipo_flag_selects_the_ipo_loss() -> None:
    assert parse("train_dpo", "--model.ipo_enable").model.loss_type == "ipo"
    assert violations("train_dpo", "--model.ipo_enable --model.loss_type hinge") == [
        "--model.ipo_enable (--model.loss_type ipo) and --model.loss_type hinge contradict each "
        "other: leave one of them out."
    ]


def test_hang_timeout_below_publish_timeout_gets_a_notice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Engines do not respond while they receive weights."""
    ppo()
    assert "hang_timeout" not in capsys.readouterr().err
    for line in ("--train.publish_timeout 900", "--vllm.hang_timeout 300"):
        ppo(line)
        assert re.search(
            r"--vllm\.hang_timeout [\d.]+ is less than --train\.publish_timeout",
            capsys.readouterr().err,
        )


@pytest.mark.parametrize(
    ("command", "line", "writes"),
    [
        ("train_rm", "--ckpt.best_metric_key eval_loss", True),
        ("train_rm", "", False),
        ("train_sft", "--eval.dataset e", False),
        ("train_sft", "--eval.dataset e --eval.patience 2", True),
        ("train_sft", "--ckpt.save_steps 2", True),
        ("train_ppo_ray", "--eval.dataset e --eval.steps 1", True),
        ("train_ppo_ray", "--eval.dataset e --eval.steps 1 --ckpt.best_metric_key none", False),
    ],
)
def test_checkpoint_flags_have_an_effect_only_if_the_run_writes_checkpoints(
    command: str, line: str, writes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(command, f"{line} --ckpt.save_hf")
    assert ("--ckpt.save_hf: no effect" in capsys.readouterr().err) != writes


@pytest.mark.parametrize(
    ("flags", "prompts"),
    [
        ("--rollout.batch_size 8", 128),
        ("--rollout.batch_size 8 --rollout.vllm_generate_batch_size 8", 128),
        ("--rollout.batch_size 16 --rollout.n_samples_per_prompt 4", 32),
        ("--rollout.batch_size 8 --train.batch_size 8 --train.micro_batch_size 1", 8),
    ],
)
def test_rollout_grows_to_one_full_optimizer_step(flags: str, prompts: int) -> None:
    config = ppo(f"{flags} --rollout.micro_batch_size 1")
    assert config.rollout.batch_size == prompts
    assert config.rollout.vllm_generate_batch_size == prompts
    assert config.updates_of(config.rollout.batch_size) == 1
