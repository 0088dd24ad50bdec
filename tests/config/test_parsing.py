"""Command-line parsing: accepted arguments, and error messages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import amend, flags_of
from openrlhf.config.options import ConfigError, parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import DPOConfig, SFTConfig
from tests.config.commands import ROOTS, SMALLEST, TRAINING, parse, ppo, read_flags, sft, violations


def test_values_are_stored_at_the_path_of_their_flag() -> None:
    config = ppo("--ds.zero_stage 3 --actor.adam.lr 2e-6 --algo.kl.init_coef=0")
    assert (config.ds.zero_stage, config.actor.adam.lr, config.algo.kl.init_coef) == (3, 2e-6, 0)
    assert config.critic.adam.lr == 9e-6


def test_unique_flag_prefix_is_accepted() -> None:
    assert sft("--train.max_e 7").train.max_epochs == 7


def test_error_for_an_ambiguous_prefix_lists_the_candidates() -> None:
    with pytest.raises(ConfigError, match=r"--adam.*--adam\.lr.*--adam\.eps"):
        sft("--adam. 1")


def test_switch_flag_takes_no_value_and_may_have_a_negated_form() -> None:
    assert sft("--ds.packing_samples").ds.packing_samples
    assert not sft("--muon.no_nesterov").muon.nesterov
    assert sft("--muon.no_nesterov --muon.nesterov").muon.nesterov
    with pytest.raises(ConfigError, match=r"ds\.packing_samples.*true"):
        sft("--ds.packing_samples=true")


def test_pair_flag_takes_two_values_that_may_be_negative() -> None:
    assert ppo("--reward.clip_range -5 2.5").reward.clip_range == (-5.0, 2.5)
    with pytest.raises(
        ConfigError, match=r"--reward\.clip_range takes 2 value\(s\), but 5 follows it"
    ):
        ppo("--reward.clip_range 5")


def test_list_flag_takes_any_number_of_values_and_may_be_repeated() -> None:
    modules = [
        "--ds.lora.target_modules q_proj v_proj",
        "--ds.lora.target_modules q_proj --ds.lora.target_modules v_proj",
    ]
    assert {sft(line).ds.lora.target_modules for line in modules} == {("q_proj", "v_proj")}


MAY_BE_UNSET = [
    (command, path)
    for command in SMALLEST
    for path, flag in flags_of(ROOTS[command]).items()
    if flag.optional or flag.shape == "list"
]


@pytest.mark.parametrize(("command", "path"), MAY_BE_UNSET)
def test_empty_value_is_no_value_for_every_flag_that_may_be_unset(command: str, path: str) -> None:
    """An unset shell variable leaves an empty value."""
    flag = flags_of(ROOTS[command])[path]
    line = [*SMALLEST[command].split(), f"--{path}="]
    given, notices = read_flags(ROOTS[command], line, command=command)
    if flag.shape == "list":
        assert given[path] == ()
    else:
        assert given[path] is None
        assert f"--{path} is empty, which means no value." in notices


def test_empty_value_of_a_switch_is_ignored() -> None:
    assert parse_config(
        ROOTS["train_sft"],
        [*SMALLEST["train_sft"].split(), "--ds.packing_samples", ""],
        command="train_sft",
    ).ds.packing_samples


def test_empty_required_flag_is_reported_as_missing() -> None:
    assert violations("train_sft", "--data.dataset=")[0].startswith("--data.dataset is required")


@pytest.mark.parametrize("dashes", ["--", "---", "-----"])
def test_word_of_dashes_is_the_value_of_the_flag_before_it(dashes: str) -> None:
    assert ppo(f"--rollout.stop {dashes} x").rollout.stop == (dashes, "x")
    assert parse("train_prm", f"--prm.placeholder_token {dashes}").prm.placeholder_token == dashes


@pytest.mark.parametrize(
    "line",
    [
        "-- --train.seed 7",
        "--train.seed 7 --",
        "--train.seed=7 -- --ds.packing_samples",
        "--ds.packing_samples -- --train.seed 7",
        "--packing_samples -- --seed 7 --",
        "--adam.betas 0.9 0.95 -- --train.seed 7",
    ],
)
def test_bare_dashes_that_no_flag_takes_as_a_value_are_ignored(line: str) -> None:
    assert sft(line).train.seed == 7


def test_all_linear_equals_the_default_target_modules() -> None:
    assert sft("--ds.lora.target_modules all-linear").ds.lora == SFTConfig().ds.lora


def test_json_flag_accepts_only_an_object() -> None:
    value = '{"max_num_seqs": 8}'
    words = [*SMALLEST["train_ppo_ray"].split(), "--vllm.engine_args"]
    config = parse_config(PPOConfig, [*words, value], command="train_ppo_ray")
    assert config.vllm.engine_args == {"max_num_seqs": 8}
    for wrong in ("[1]", "{max_num_seqs: 8}"):
        with pytest.raises(ConfigError, match=r"--vllm\.engine_args takes a JSON object"):
            parse_config(PPOConfig, [*words, wrong], command="train_ppo_ray")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--train.batch_size many", "--train.batch_size takes a whole number, not 'many'."),
        ("--train.batch_size 1.5", "--train.batch_size takes a whole number, not '1.5'."),
        ("--adam.lr fast", "--adam.lr takes a number, not 'fast'."),
        (
            "--ds.param_dtype bf17",
            "--ds.param_dtype must be one of bf16, fp16, fp32, not 'bf17'. Did you mean bf16?",
        ),
    ],
)
def test_error_for_an_invalid_value_quotes_the_user_input(line: str, sentence: str) -> None:
    assert violations("train_sft", line) == [sentence]


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("train_sft", "--train.batchsize", "--train.batch_size"),
        ("train_sft", "--batch_size", "--train.batch_size"),
        ("train_sft", "--weight_decay", "--adam.weight_decay"),
        ("train_sft", "--data.max_length", "--data.max_len"),
        ("train_ppo_ray", "--samples_per_prompt", "--rollout.n_samples_per_prompt"),
        ("train_ppo_ray", "--advantage_estimater", "--algo.advantage.estimator"),
        ("train_ppo_ray", "--kl.init_coef", "--algo.kl.init_coef"),
        ("train_ppo_ray", "--model.model_name_or_path", "--actor.model_name_or_path"),
        ("eval", "--data.prompt_dataset", "--eval.dataset"),
    ],
)
def test_error_for_an_unknown_flag_suggests_the_intended_flag(
    command: str, typed: str, meant: str
) -> None:
    (sentence,) = violations(command, f"{typed} 1")
    assert sentence.startswith(f"{command} has no flag {typed}. Did you mean ")
    assert meant in sentence


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray", "train_kto"])
@pytest.mark.parametrize("typed", ["--data.inptu_key", "--data.imput_key", "--inptu_key"])
def test_error_for_a_misspelled_flag_suggests_the_most_similar_flag_first(
    command: str, typed: str
) -> None:
    (sentence,) = violations(command, f"{typed} 1")
    suggested = sentence.partition("Did you mean ")[2].removesuffix("?").split(" or ")
    assert suggested[0] == "--data.input_key"
    assert "--logger.wandb.key" not in suggested


@pytest.mark.parametrize("typed", ["--ds", "--ds.", "--ds.lora."])
def test_error_for_a_section_without_a_flag_name_suggests_the_help_of_the_section(
    typed: str,
) -> None:
    section = f"{typed.removeprefix('--').rstrip('.')}."
    (sentence,) = violations("train_sft", f"{typed} 1")
    assert sentence.startswith(f"train_sft has no flag {typed}.")
    assert sentence.endswith(f" --help {section} lists the flags of this section.")


def test_error_for_an_unknown_flag_without_a_close_match_has_no_suggestion() -> None:
    assert violations("train_sft", "--xyzzy") == ["train_sft has no flag --xyzzy."]


def test_words_that_belong_to_no_flag_raise_an_error() -> None:
    assert violations("train_sft", "--ds.packing_samples yes") == [
        (
            "--ds.packing_samples is a switch and takes no value, not even true or "
            "false: leave yes out."
        )
    ]
    with pytest.raises(ConfigError, match=r"Unexpected argument seed 3"):
        parse_config(SFTConfig, ["seed", "3"], command="train_sft")


def test_unknown_flags_and_wrong_values_are_reported_together() -> None:
    line = "--xyzzy --train.batch_size a --ds.zero_stage b"
    with pytest.raises(ConfigError) as caught:
        sft(line)
    assert len(caught.value.violations) == 3
    assert all(part in str(caught.value) for part in ("xyzzy", "'a'", "'b'", "3 mistakes"))


def test_given_values_do_not_include_defaults() -> None:
    words = ["--ds.attn_implementation", "flash_attention_2"]
    given, _ = read_flags(SFTConfig, words, command="x")
    assert given == {"ds.attn_implementation": "flash_attention_2"}


def test_configuration_is_immutable() -> None:
    config = sft()
    with pytest.raises(FrozenInstanceError):
        config.ds.zero_stage = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert amend(config, {"ds.lora.rank": 4}).ds.lora.rank == 4
    assert config.ds.lora.rank == 0


def test_notices_are_single_lines_on_stderr_of_rank_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sft("--eval.steps 5")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "[notice] --eval.steps: no effect without --eval.dataset.\n"
    monkeypatch.setenv("RANK", "1")
    sft("--eval.steps 5")
    assert capsys.readouterr().err == ""


DRIVER = """
import sys
from openrlhf.config.options import ConfigError, parse_config
from {module} import {root}
HEAVY = {"torch", "transformers", "ray", "vllm", "deepspeed", "datasets", "yaml", "numpy"}
try:
    parse_config({root}, sys.argv[1:], command="{command}")
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
finally:
    loaded = HEAVY & sys.modules.keys()
    assert not loaded, loaded
"""


def run_driver(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    root = ROOTS[command]
    code = (
        DRIVER.replace("{module}", root.__module__)
        .replace("{root}", root.__name__)
        .replace("{command}", command)
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("command", SMALLEST)
def test_help_shows_every_section_without_importing_heavy_libraries(command: str) -> None:
    done = run_driver(command, "--help", "all")
    assert (done.returncode, done.stderr) == (0, "")
    shown = (
        ["--train.batch_size INT", "(128)", "LoRA adapters"]
        if command in TRAINING
        else ["--data.max_len INT", "(4096)" if command == "interactive_chat" else "(2048)"]
    )
    for text in (*shown, "--ds.param_dtype {bf16,fp16,fp32}", "--config"):
        assert text in done.stdout


def test_parsing_without_a_file_imports_no_heavy_libraries() -> None:
    done = run_driver("train_ppo_ray", *SMALLEST["train_ppo_ray"].split())
    assert done.returncode == 0, done.stderr


def test_command_line_mistake_exits_with_status_2_and_a_message_on_stderr() -> None:
    done = run_driver("train_sft", "--train.batchsize", "3")
    assert done.returncode == 2
    assert "Did you mean --train.batch_size" in done.stderr


def test_error_names_missing_required_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(SFTConfig, [], command="train_sft")
    text = str(caught.value)
    assert "--model.model_name_or_path is required" in text
    assert "--data.dataset is required" in text


@pytest.mark.parametrize("command", SMALLEST)
def test_minimal_command_lines_are_valid(command: str) -> None:
    assert parse(command).check() == []


# ---- mistakes, all at once


@pytest.mark.parametrize(
    ("command", "line", "path"),
    [
        ("train_sft", "--bf16 False", "ds.param_dtype"),
        ("train_sft", "--flash_attn eager", "ds.attn_implementation"),
        ("train_ppo_ray", "--use_kl_estimator_k3 junk words", "algo.kl.estimator"),
        ("train_sft", "--packing_samples True", ""),
        ("train_sft", "--perf yes", ""),
    ],
)
def test_words_after_a_current_or_old_switch_raise_an_error(
    command: str, line: str, path: str
) -> None:
    (sentence,) = violations(command, line)
    words = line.partition(" ")[2]
    assert f"is a switch and takes no value, not even true or false: leave {words} out" in sentence
    assert not path or f"set --{path}" in sentence


@pytest.mark.parametrize(
    ("command", "line", "meant"),
    [
        ("train_ppo_ray", "--lr 1", "Did you mean --actor.adam.lr or --critic.adam.lr?"),
        ("train_ppo_ray", "--actor.lr 1", "--actor.adam.lr"),
        ("train_sft", "--lr 1", "Did you mean --adam.lr?"),
        ("train_ppo_ray", "--kl_coef 1", "Did you mean --algo.kl.init_coef?"),
        ("train_sft", "--fp16", "Did you mean --ds.param_dtype?"),
        ("train_sft", "--max_seq_length 1", "Did you mean --data.max_len?"),
        ("train_ppo_ray", "--num_generations 1", "Did you mean --rollout.n_samples_per_prompt?"),
        ("train_sft", "--pre m", "--model.model_name_or_path"),
    ],
)
def test_error_for_short_names_or_names_from_other_frameworks_suggests_the_matching_flags(
    command: str, line: str, meant: str
) -> None:
    (sentence,) = violations(command, line)
    assert meant in sentence


def test_all_kinds_of_mistakes_are_reported_together() -> None:
    """One command line contains every kind of mistake.

    The mistakes are an unknown name, an ambiguous name, a missing value, an invalid value, a
    rejected flag and a broken rule.
    """
    found = violations(
        "train_ppo_ray",
        (
            "--xyzzy --adam. 1 --reward.clip_range 5 --actor.adam.lr fast --use_ms "
            "--rollout.temperature 0"
        ),
    )
    for part in (
        "--xyzzy",
        "--adam.",
        "clip_range takes 2 value(s)",
        "'fast'",
        "--use_ms is not",
        "selects greedy",
    ):
        assert len([text for text in found if part in text]) == 1, part
    assert len(found) == 6


def test_violations_caused_by_another_mistake_are_not_reported() -> None:
    line = (
        "--actor.model_name_or_path m --data.prompt_dataset d --reward.verifier math "
        "--data.label_key l"
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(
            PPOConfig,
            f"{line} --train.batchsize 8 --rollout.batch_size 4".split(),
            command="train_ppo_ray",
        )
    # The default --train.batch_size of 128 is not reported as a violation.
    assert len(caught.value.violations) == 1
    assert violations("train_ppo_ray", "--ds.experts_implementation eager") == [
        "--ds.experts_implementation eager is not available yet: leave it out."
    ]


def test_old_names_get_a_single_notice_however_many_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sft("--max_len 4096 --train_batch_size 256 --max_samples 5000 --zero_stage 2 --bf16")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[notice] --max_len is now --data.max_len; --train_batch_size is now ")
    assert line.count(" is now ") == 5


@pytest.mark.parametrize(
    ("root", "word", "found"),
    [
        (PPOConfig, "group_norm", "--algo.advantage.estimator"),
        (PPOConfig, "grpo", "--algo.advantage.estimator"),
        (PPOConfig, "GRPO", "--algo.kl.use_loss"),
        (PPOConfig, "dapo", "--algo.dynamic_filtering_enable"),
        (PPOConfig, "dr-grpo", "--algo.loss.aggregation"),
        (PPOConfig, "reinforce++", "--algo.advantage.estimator"),
        (PPOConfig, "gspo", "--actor.policy_loss_type"),
        (DPOConfig, "orpo", "--model.loss_type"),
    ],
)
def test_help_for_a_choice_or_method_lists_its_flags(
    root: type[Any], word: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(root, ["--help", word], command="command")
    assert found in capsys.readouterr().out


def test_help_for_the_estimator_flag_names_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(PPOConfig, ["--help", "advantage.estimator"], command="train_ppo_ray")
    printed = " ".join(capsys.readouterr().out.split())
    for pair in ("gae: PPO", "reinforce: REINFORCE++", "rloo: RLOO", "group_norm: GRPO"):
        assert pair in printed
    assert "dr_grpo: Dr. GRPO" in printed


def test_short_help_lists_required_flags_first_and_help_for_a_word_finds_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(*words: str) -> str:
        with pytest.raises(SystemExit):
            parse_config(PPOConfig, ["--help", *words], command="train_ppo_ray")
        return capsys.readouterr().out

    short = printed()
    assert len(short.splitlines()) < 40
    assert (
        short.index("--actor.model_name_or_path") < short.index("Sections:") < short.index("algo.*")
    )
    found = printed("async")
    assert "--train.async_enable" in found and "--actor.adam.lr" not in found
    nothing = printed("nonsense")
    assert "contain nonsense" in nothing and "--help all" in nothing
    assert len(printed("all").splitlines()) > 200
    for word in ("ds.experts_implementation", "use_ms"):
        assert " ".join(printed(word).split()).endswith("Not available yet."), word
