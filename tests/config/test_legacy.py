"""Flat flag names and values from earlier releases.

All names accepted by the old commands are tested.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.config import legacy
from openrlhf.config.choices import CORRECTIONS
from openrlhf.config.flags import flags_of, value_at
from openrlhf.config.legacy_values import accepted_flags
from openrlhf.config.options import ConfigError, changed_flags, parse_config
from openrlhf.config.ppo import PPOConfig
from tests.config.commands import ROOTS, WITH_OLD, parse, ppo, read_flags, sft, violations

# Each row has a command, an old name with its value, and the resulting values by path.
# The table has one row for each kind of name and for each exception.
RENAMED = [
    ("train_sft", "--pretrain m", {"model.model_name_or_path": "m"}),
    ("train_sft", "--learning_rate 1e-4", {"adam.lr": 1e-4}),
    ("train_sft", "--adam_betas 0.8 0.9", {"adam.betas": (0.8, 0.9)}),
    ("train_sft", "--l2=0.1", {"adam.weight_decay": 0.1}),
    ("train_sft", "--gradient_checkpointing", {"model.gradient_checkpointing_enable": True}),
    ("train_sft", "--pretrain_mode", {"model.pretrain_mode_enable": True}),
    ("train_sft", "--use_wandb key", {"logger.wandb.key": "key"}),
    ("train_sft", "--max_ckpt_mem 10", {"ckpt.max_mem": 10.0}),
    ("train_sft", "--target_modules q_proj v_proj",
     {"ds.lora.target_modules": ("q_proj", "v_proj")}),
    ("train_sft", "--train_split test", {"data.dataset_split": "test"}),
    ("train_sft", "--bf16", {"ds.param_dtype": "bf16"}),
    ("train_sft", "--flash_attn", {"ds.attn_implementation": "flash_attention_2"}),
    ("train_sft", "--torch_compile", {"ds.torch_compile": True}),
    ("train_sft", "--balancing_loss_coef 0.1", {"model.aux_loss_coef": 0.1}),
    ("train_sft", "--actor.model_name_or_path m", {"model.model_name_or_path": "m"}),
    ("train_sft", "--actor.pretrain_mode_enable", {"model.pretrain_mode_enable": True}),
    ("train_ppo_ray", "--pretrain m", {"actor.model_name_or_path": "m"}),
    ("train_ppo_ray", "--adam_betas 0.8 0.9",
     {"actor.adam.betas": (0.8, 0.9), "critic.adam.betas": (0.8, 0.9)}),
    ("train_ppo_ray", "--max_norm 2", {"actor.max_norm": 2.0, "critic.max_norm": 2.0}),
    ("train_ppo_ray", "--ref_reward_offload", {"ref.offload": True, "reward.offload": True}),
    ("train_ppo_ray", "--actor_num_gpus_per_node 2", {"actor.num_gpus_per_node": 2}),
    ("train_ppo_ray", "--colocate_all_models", {"train.colocate_all": True}),
    ("train_ppo_ray", "--advantage_estimator rloo", {"algo.advantage.estimator": "rloo"}),
    ("train_ppo_ray", "--use_kl_estimator_k3", {"algo.kl.estimator": "k3"}),
    ("train_ppo_ray", "--enable_vllm_is_correction",
     {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip"}),
    ("train_ppo_ray", "--enable_vllm_is_correction --use_icepop",
     {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "mask"}),
    ("train_ppo_ray", "--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
     {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_mode": "mask"}),
    ("train_ppo_ray", "--use_icepop", {}),
    ("train_ppo_ray", "--algo.advantage.is_correction_enable",
     {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip"}),
    ("train_ppo_ray",
     "--algo.correction.level token --algo.correction.mode truncate --algo.correction.band 0.5 2",
     {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip",
      "algo.advantage.is_correction_threshold": (0.0, 2.0)}),
    ("train_ppo_ray", "--algo.correction.mode truncate",
     {"algo.advantage.is_correction_mode": "clip",
      "algo.advantage.is_correction_threshold": (0.0, 5.0)}),
    ("train_ppo_ray",
     "--algo.correction.level geometric --algo.correction.mode mask --algo.correction.band 0.5 2",
     {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_mode": "mask",
      "algo.advantage.is_correction_threshold": (0.5, 2.0)}),
    ("train_ppo_ray",
     "--algo.correction.level geometric --algo.correction.mode clip --algo.correction.band 0.5 2",
     {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_mode": "clip",
      "algo.advantage.is_correction_threshold": (0.5, 2.0)}),
    ("train_ppo_ray",
     "--algo.correction.level geometric --algo.correction.mode truncate "
     "--algo.correction.band 0.5 2",
     {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_mode": "clip",
      "algo.advantage.is_correction_threshold": (0.0, 2.0)}),
    # Without a preset, earlier releases ignored --algo.advantage.is_correction_threshold.
    ("train_ppo_ray",
     "--algo.correction.level token --algo.correction.mode clip --algo.correction.band 0.5 2 "
     "--algo.advantage.is_correction_threshold 0.1 9",
     {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip",
      "algo.advantage.is_correction_threshold": (0.5, 2.0)}),
    ("train_ppo_ray", "--algo.correction.level=sequence --algo.correction.mode=clip",
     {"algo.advantage.is_correction_level": "seq-product",
      "algo.advantage.is_correction_mode": "clip"}),
    ("train_ppo_ray", "--actor.loss_agg_mode token-mean", {"algo.loss.aggregation": "token"}),
    ("train_ppo_ray", "--actor.loss_agg_mode seq-mean-token-mean",
     {"algo.loss.aggregation": "sequence"}),
    ("train_ppo_ray", "--vllm_is_truncated_threshold 2",
     {"algo.advantage.is_correction_threshold": (0, 2)}),
    ("train_ppo_ray", "--vllm_is_truncated_threshold 0.5 5",
     {"algo.advantage.is_correction_threshold": (0.5, 5)}),
    ("train_ppo_ray", "--aux_loss_coef 0.1", {"actor.aux_loss_coef": 0.1}),
    ("train_ppo_ray", "--entropy_loss_coef 0.1", {"actor.entropy_coef": 0.1}),
    ("train_ppo_ray", "--pretrain_data d", {"algo.ptx.dataset": "d"}),
    ("train_ppo_ray", "--ptx_coef 0.1", {"algo.ptx.coef": 0.1}),
    ("train_ppo_ray", "--label_key answer", {"data.label_key": "answer"}),
    ("train_ppo_ray", "--value_prefix_head v", {"ds.value_head_prefix": "v"}),
    ("train_ppo_ray", "--dynamic_filtering", {"algo.dynamic_filtering_enable": True}),
    ("serve_rm", "--reward_pretrain m", {"reward.model_name_or_path": "m"}),
    ("serve_rm", "--normalize_reward", {"reward.normalize_enable": True}),
    ("serve_rm", "--bf16", {"ds.param_dtype": "bf16"}),
    ("serve_rm", "--max_len 512", {"data.max_len": 512}),
    ("train_ppo", "--micro_rollout_batch_size 2", {"rollout.micro_batch_size": 2}),
    ("batch_inference", "--eval_task generate_vllm", {"task": "generate_vllm"}),
    ("batch_inference", "--greedy_sampling", {"rollout.temperature": 0.0}),
    ("batch_inference", "--max_num_seqs 8", {"vllm.engine_args": {"max_num_seqs": 8}}),
    ("batch_inference", "--tp_size 2", {"vllm.tensor_parallel_size": 2}),
    ("batch_inference", "--post_processor ca", {"post_processor": "csft"}),
    ("batch_inference", "--post_processor=dt", {"post_processor": "csft"}),
    ("batch_inference", "--post_processor None", {"post_processor": "none"}),
    ("batch_inference", "--post_processor null", {"post_processor": "none"}),
    ("batch_inference", "--normalize_reward", {"reward.normalize_enable": True}),
    ("batch_inference", "--rollout_batch_size 8", {"rollout.batch_size": 8}),
    ("interactive_chat", "--ta_prompt f", {"preamble": "f"}),
    ("interactive_chat", "--csft_prompt 9", {"csft.prompt": "9"}),
]  # fmt: skip

# Flat flag names accepted by recent releases, keyed by command.
OLD: dict[str, list[str]] = json.loads((Path(__file__).parent / "old_flags.json").read_text())


@pytest.mark.parametrize(("command", "line", "values"), RENAMED)
def test_old_name_sets_the_current_flag_with_one_notice(
    command: str, line: str, values: dict[str, object]
) -> None:
    given, notices = read_flags(WITH_OLD[command], line.split(), command=command)
    assert given == values
    (notice,) = notices
    assert notice.startswith(line.split()[0].partition("=")[0])
    assert all(path in notice for path in values)


@pytest.mark.parametrize(
    ("line", "level", "mode", "threshold"),
    [
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_level off",
            "off",
            "clip",
            (0.5, 5.0),
        ),
        (
            "--algo.correction.level geometric --algo.correction.mode truncate "
            "--algo.correction.band 0.5 2 --algo.advantage.is_correction_level token "
            "--algo.advantage.is_correction_threshold 0.1 9",
            "token",
            "clip",
            (0.1, 9.0),
        ),
    ],
)
def test_current_correction_flags_take_precedence_over_old_ones(
    line: str, level: str, mode: str, threshold: tuple[float, float]
) -> None:
    advantage = ppo(line).algo.advantage
    assert advantage.is_correction_level == level
    assert advantage.is_correction_mode == mode
    assert advantage.is_correction_threshold == threshold


def test_suggestion_for_a_misspelled_old_correction_is_a_current_flag() -> None:
    (sentence,) = violations("train_ppo_ray", "--enable_vllm_is_corection")
    assert "--algo.advantage.is_correction_level" in sentence
    assert "is_correction_enable" not in sentence


@pytest.mark.parametrize("command", OLD)
def test_every_flat_name_of_the_old_command_is_accepted(command: str) -> None:
    flags = accepted_flags(WITH_OLD[command])
    known = legacy.aliases(flags)
    handled = (
        known.keys()
        | flags.keys()
        | legacy.SWITCHES.keys()
        | legacy.IGNORED.keys()
        | set(legacy.OLD_LENGTHS)
    )
    assert [name for name in OLD[command] if name not in handled] == []
    for name, targets in known.items():
        shapes = {flags[path].shape for path in targets}
        assert len(shapes) == 1, name


@pytest.mark.parametrize("command", ROOTS)
def test_no_alias_shadows_a_current_flag(command: str) -> None:
    flags = accepted_flags(ROOTS[command])
    assert not legacy.aliases(flags).keys() & flags.keys()
    assert (
        not (legacy.IGNORED.keys() | legacy.REMOVED.keys() | legacy.SWITCHES.keys()) & flags.keys()
    )


@pytest.mark.parametrize("command", ["train_ppo_ray", "train_ppo"])
def test_old_correction_in_a_file_and_on_the_command_line_are_combined(
    command: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("algo:\n  advantage:\n    is_correction_enable: true\n")
    line = f"--config {file} --algo.advantage.is_correction_type seq-mask-tis"
    given, (notice,) = read_flags(WITH_OLD[command], line.split(), command=command)
    assert given == {
        "algo.advantage.is_correction_level": "seq",
        "algo.advantage.is_correction_mode": "mask",
    }
    assert "--algo.advantage.is_correction_level seq" in notice


LEVELS = {"token": "token", "sequence": "seq-product", "geometric": "seq"}


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("mode", ["clip", "mask", "truncate"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_correction_of_earlier_releases_is_accepted_in_configuration_files(
    level: str, mode: str, loss: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"algo:\n  correction:\n    level: {level}\n    mode: {mode}\n    band: [0.5, 2]\n"
    )
    advantage = ppo(f"--config {file} --actor.policy_loss_type {loss}").algo.advantage
    mean, low = mode, 0.5
    if mode == "truncate":
        mean, low = "clip", 0.0
    assert advantage.is_correction_level == LEVELS[level]
    assert advantage.is_correction_mode == mean
    assert advantage.is_correction_gating == "ratio"
    assert advantage.is_correction_threshold == (low, 2.0)


def test_resumed_run_with_an_old_correction_flag_reports_no_changed_flags(tmp_path: Path) -> None:
    line = "--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip"
    config = ppo(f"{line} --algo.advantage.is_correction_threshold 0 2")
    before = (
        "algo:\n  advantage: {is_correction_enable: false, is_correction_type: tis, "
        "is_correction_threshold: [0.5, 5.0]}\n"
        "  correction: {level: geometric, mode: truncate, band: [0.5, 2.0]}\n"
    )
    assert changed_flags(before, config) == []
    off = before.replace("level: geometric, mode: truncate, band: [0.5, 2.0]", "level: null")
    (level, threshold) = changed_flags(off, config)
    assert level == "--algo.advantage.is_correction_level seq (before: off)"
    assert threshold.startswith("--algo.advantage.is_correction_threshold")


def test_resumed_run_with_a_truncating_preset_keeps_its_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CORRECTIONS, "own", ("token", "truncate"))
    flags = "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type own"
    config = ppo(f"{flags} --algo.advantage.is_correction_threshold 0.5 3")
    before = (
        "algo:\n  advantage: {is_correction_enable: true, is_correction_type: own, "
        "is_correction_threshold: [0.5, 3.0]}\n"
    )
    assert changed_flags(before, config) == []
    [changed] = changed_flags(before.replace("3.0", "4.0"), config)
    assert changed.startswith("--algo.advantage.is_correction_threshold [0.0, 3.0]")
    assert "4.0" in changed


def test_preset_without_its_enable_flag_has_no_effect_if_a_current_mode_is_set() -> None:
    line = "--algo.advantage.is_correction_type tis --algo.advantage.is_correction_mode mask"
    given, (notice,) = read_flags(PPOConfig, line.split(), command="train_ppo_ray")
    assert given == {"algo.advantage.is_correction_mode": "mask"}
    assert "--algo.advantage.is_correction_enable" in notice
    assert "--algo.advantage.is_correction_level" in notice


def test_level_off_in_a_file_is_read_as_text_instead_of_a_boolean(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("algo.advantage.is_correction_level: off\n")
    given, _ = read_flags(PPOConfig, ["--config", str(file)], command="train_ppo_ray")
    assert given == {"algo.advantage.is_correction_level": "off"}


def test_unknown_value_of_an_old_flag_is_rejected_with_the_valid_choices() -> None:
    (sentence,) = violations("train_ppo_ray", "--actor.loss_agg_mode mean")
    assert "--actor.loss_agg_mode must be one of token-mean, seq-mean-token-mean" in sentence


def test_old_batch_inference_launch_script_runs() -> None:
    line = (
        "--eval_task generate_vllm --pretrain m --bf16 --max_new_tokens 256 --prompt_max_len 512 "
        "--dataset d --input_key q --temperature 0.9 --zero_stage 0 --best_of_n 4 "
        "--enable_prefix_caching --tp_size 1 --max_num_seqs 64 --iter 2 --rollout_batch_size 128 "
        "--output_path o.jsonl --apply_chat_template"
    )
    config = parse_config(ROOTS["batch_inference"], line.split(), command="batch_inference")
    assert (config.rollout.max_new_tokens, config.data.max_len, config.best_of_n) == (256, 768, 4)
    assert config.vllm.engine_args == {"max_num_seqs": 64}


def test_current_names_are_accepted_without_a_notice() -> None:
    words = ["--train.seed", "3"]
    assert read_flags(ROOTS["train_sft"], words, command="train_sft") == ({"train.seed": 3}, [])


@pytest.mark.parametrize(
    ("line", "max_len", "max_new_tokens"),
    [
        ("--prompt_max_len 100 --generate_max_len 28", 128, 28),
        ("--generate_max_len=28", 1052, 28),
        ("--prompt_max_len 100", 1124, 1024),
        ("--prompt_max_len 100 --generate_max_len 28 --max_len 500", 500, 28),
        ("--prompt_max_len 100 --max_new_tokens 28", 128, 28),
        ("--max_new_tokens 28", 2048, 28),
    ],
)
def test_old_lengths_are_translated_to_total_and_response_length(
    line: str, max_len: int, max_new_tokens: int
) -> None:
    config = ppo(line)
    assert (config.data.max_len, config.rollout.max_new_tokens) == (max_len, max_new_tokens)


@pytest.mark.parametrize(
    ("line", "max_len", "max_new_tokens"),
    [
        ("--max_new_tokens 2048 --prompt_max_len 2048", 4096, 2048),
        ("--max_new_tokens 2048 --prompt_max_len 1024", 3072, 2048),
        ("--max_new_tokens 2048", 3072, 2048),
        ("--max_new_tokens 8 --prompt_max_len 16", 24, 8),
        ("--prompt_max_len 16 --rollout.max_new_tokens 8", 24, 8),
        ("--prompt_max_len 16", 1040, 1024),
        ("--max_new_tokens 8 --max_len 4096", 4096, 8),
        ("--rollout.max_new_tokens 8", 2048, 8),
    ],
)
def test_old_batch_inference_adds_answer_length_to_prompt_length(
    line: str, max_len: int, max_new_tokens: int
) -> None:
    config = parse("batch_inference", line)
    assert (config.data.max_len, config.rollout.max_new_tokens) == (max_len, max_new_tokens)


def test_length_in_a_file_is_kept_with_an_old_answer_length(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text("data:\n  max_len: 8192\n")
    config = parse("batch_inference", f"--config {tmp_path}/c.yaml --max_new_tokens 8")
    assert (config.data.max_len, config.rollout.max_new_tokens) == (8192, 8)


def test_error_names_an_old_length_that_is_not_a_number() -> None:
    assert violations("train_ppo_ray", "--prompt_max_len ²") == [
        "--prompt_max_len takes a whole number, not '²'."
    ]
    assert violations("train_ppo_ray", "--prompt_max_len long") == [
        "--prompt_max_len takes a whole number, not 'long'."
    ]
    assert violations("batch_inference", "--max_new_tokens long") == [
        "--rollout.max_new_tokens takes a whole number, not 'long'."
    ]


def test_old_switches_without_effect_are_dropped_with_a_notice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ppo("--perf --run.dir r") == ppo("--run.dir r")
    assert "--perf no longer has an effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag"),
    [("train_sft", "--save_hf_model"), ("train_ppo_ray", "--inference_tp_size 1")],
)
def test_old_flag_that_asks_for_the_only_behavior_is_dropped_with_a_notice(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(command, f"{flag} --run.dir r") == parse(command, "--run.dir r")
    assert f"{flag.replace(' ', '=')} no longer has an effect" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray"])
def test_run_without_checkpoints_may_keep_none(command: str) -> None:
    assert parse(command, "--max_ckpt_num 0 --save_steps -1").ckpt.max_num == 0


@pytest.mark.parametrize(
    ("command", "line", "path", "value"),
    [
        ("train_sft", "--max_epoch 3", "train.max_epochs", 3),
        ("train_dpo", "--learning 1e-6", "adam.lr", 1e-6),
        ("train_ppo_ray", "--actor_learning=1e-6", "actor.adam.lr", 1e-6),
    ],
)
def test_unique_prefix_of_an_old_name_is_accepted(
    command: str, line: str, path: str, value: object
) -> None:
    assert value_at(parse(command, line), path) == value


def test_prefix_of_an_old_name_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    sft("--output answer")
    assert "--output is read as --output_key." in capsys.readouterr().err
    sft("--output_key answer --data.input_k question")
    assert "is read as" not in capsys.readouterr().err


def test_ambiguous_prefix_of_old_names_is_refused() -> None:
    (sentence,) = violations("train_sft", "--max_ckpt 3")
    assert "--max_ckpt" in sentence


@pytest.mark.parametrize("name", legacy.REMOVED)
def test_removed_flag_is_refused_with_advice(name: str) -> None:
    (sentence,) = violations("train_sft", f"--{name}")
    assert sentence.startswith(f"--{name} no longer exists. ")
    assert len(sentence) > len(f"--{name} no longer exists. ") + 20


def test_messages_explain_old_kto_and_distillation_switches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse("train_kto", "--unpaired_preference")
    assert (
        "--unpaired_preference no longer has an effect: each KTO row has a prompt, an"
        in capsys.readouterr().err
    )
    assert "KTO has a single loss" in violations("train_kto", "--vanilla_loss")[0]
    assert "with --kd.teacher_model" in violations("train_kd", "--teacher_peft_model p")[0]


def test_value_of_a_removed_flag_is_dropped_with_it() -> None:
    assert len(violations("train_sft", "--bos_token <s> --eos_token=</s>")) == 2


def test_launch_script_of_an_old_release_runs() -> None:
    config = sft(
        "--max_len 4096 --train_batch_size 256 --micro_train_batch_size 2 --max_samples 5000 "
        "--save_path ./c --save_steps -1 --logging_steps 1 --eval_steps -1 --zero_stage 2 "
        "--max_epochs 1 --packing_samples --bf16 --flash_attn --learning_rate 5e-6 --local_rank=0"
    )
    assert (config.data.max_len, config.train.batch_size, config.adam.lr) == (4096, 256, 5e-6)
    assert config.ds.packing_samples and config.local_rank == 0


def test_old_names_of_other_commands_are_unknown() -> None:
    with pytest.raises(ConfigError, match="train_sft has no flag --prompt_data"):
        sft("--prompt_data x")


def test_local_ppo_command_accepts_the_old_names_of_rl_flags() -> None:
    line = (
        "--pretrain m --prompt_data d --advantage_estimator reinforce --label_key l "
        "--reward.verifier math"
    )
    config = parse_config(PPOConfig, line.split(), command="train_ppo")
    assert value_at(config, "actor.model_name_or_path") == "m"


@pytest.mark.parametrize(
    ("command", "line", "named"),
    [
        (
            "train_ppo_ray",
            "--pretrain m",
            {"lambd 1.0", "value_clip 0.5", "attn_implementation", "param_dtype"},
        ),
        (
            "train_ppo_ray",
            "--pretrain m --eval_dataset e",
            {"lambd", "value_clip", "split train", "attn_imp", "param_d"},
        ),
        ("train_ppo_ray", "--pretrain m --lambd 0.95 --value_clip 0.2 --bf16 --flash_attn", set()),
        ("train_ppo_ray", "--pretrain m --advantage_estimator rloo --bf16 --flash_attn", set()),
        ("train_ppo_ray", "--actor.model_name_or_path m", set()),
        ("train_sft", "--pretrain m", {"attn_implementation", "param_dtype"}),
    ],
)
def test_script_with_flat_flags_gets_a_single_notice_about_changed_defaults(
    command: str, line: str, named: set[str]
) -> None:
    groups = [(part.split()[0], part.split()[1:]) for part in line.split("--")[1:]]
    said = [
        text
        for text in legacy.translate(groups, flags_of(ROOTS[command])).notices
        if "(was " in text
    ]
    assert len(said) == bool(named)
    for text in said:
        assert text.count("(was ") == len(named) and all(name in text for name in named)
