"""From command-line arguments to values: what is accepted, and how mistakes are reported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import amend
from openrlhf.config.options import ConfigError, parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import DPOConfig, SFTConfig
from tests.config.commands import ROOTS, SMALLEST, TRAINING, parse, ppo, read_flags, sft, violations


def test_values_arrive_at_the_path_of_their_flag() -> None:
    config = ppo("--ds.zero_stage 3 --actor.adam.lr 2e-6 --algo.kl.init_coef=0")
    assert (config.ds.zero_stage, config.actor.adam.lr, config.algo.kl.init_coef) == (3, 2e-6, 0)
    assert config.critic.adam.lr == 9e-6


def test_a_unique_beginning_of_a_flag_is_enough() -> None:
    assert sft("--train.max_e 7").train.max_epochs == 7


def test_an_ambiguous_beginning_is_answered_with_the_candidates() -> None:
    with pytest.raises(ConfigError, match=r"--adam.*--adam\.lr.*--adam\.eps"):
        sft("--adam. 1")


def test_a_switch_takes_no_value_and_some_have_an_opposite() -> None:
    assert sft("--ds.packing_samples").ds.packing_samples
    assert not sft("--muon.no_nesterov").muon.nesterov
    assert sft("--muon.no_nesterov --muon.nesterov").muon.nesterov
    with pytest.raises(ConfigError, match=r"ds\.packing_samples.*true"):
        sft("--ds.packing_samples=true")


def test_pairs_are_two_words_and_may_be_negative() -> None:
    assert ppo("--reward.clip_range -5 2.5").reward.clip_range == (-5.0, 2.5)
    with pytest.raises(
        ConfigError, match=r"--reward\.clip_range takes two values, but 5 follows it"
    ):
        ppo("--reward.clip_range 5")


def test_lists_take_any_number_of_words_and_repeated_flags() -> None:
    modules = [
        "--ds.lora.target_modules q_proj v_proj",
        "--ds.lora.target_modules q_proj --ds.lora.target_modules v_proj",
    ]
    assert {sft(line).ds.lora.target_modules for line in modules} == {("q_proj", "v_proj")}


def test_the_word_all_linear_means_what_the_default_means() -> None:
    assert sft("--ds.lora.target_modules all-linear").ds.lora == SFTConfig().ds.lora


def test_json_flags_take_an_object_and_nothing_else() -> None:
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
            "--ds.param_dtype takes one of bf16, fp16, fp32, not 'bf17'. Did you mean bf16?",
        ),
    ],
)
def test_a_wrong_value_is_answered_in_the_words_of_the_user(line: str, sentence: str) -> None:
    assert violations("train_sft", line) == [sentence]


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("train_sft", "--train.batchsize", "--train.batch_size"),
        ("train_sft", "--batch_size", "--train.batch_size"),
        ("train_sft", "--weight_decay", "--adam.weight_decay"),
        ("train_sft", "--data.max_length", "--data.max_len"),
        ("train_ppo_ray", "--n_samples", "--rollout.n_samples_per_prompt"),
        ("train_ppo_ray", "--advantage_estimater", "--algo.advantage.estimator"),
        ("train_ppo_ray", "--kl.init_coef", "--algo.kl.init_coef"),
        ("train_ppo_ray", "--model.model_name_or_path", "--actor.model_name_or_path"),
        ("eval", "--data.prompt_dataset", "--eval.dataset"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(
    command: str, typed: str, meant: str
) -> None:
    (sentence,) = violations(command, f"{typed} 1")
    assert sentence.startswith(f"{command} has no flag {typed}. Did you mean ")
    assert meant in sentence


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray", "train_kto"])
@pytest.mark.parametrize("typed", ["--data.inptu_key", "--data.imput_key", "--inptu_key"])
def test_a_misspelled_flag_is_answered_with_the_most_similar_flag_first(
    command: str, typed: str
) -> None:
    (sentence,) = violations(command, f"{typed} 1")
    suggested = sentence.partition("Did you mean ")[2].removesuffix("?").split(" or ")
    assert suggested[0] == "--data.input_key"
    assert "--logger.wandb.key" not in suggested


def test_a_flag_like_no_other_gets_no_suggestion() -> None:
    assert violations("train_sft", "--xyzzy") == ["train_sft has no flag --xyzzy."]


def test_words_that_belong_to_no_flag_are_an_error() -> None:
    assert violations("train_sft", "--ds.packing_samples yes") == [
        (
            "--ds.packing_samples is a switch and takes no value, not even true or "
            "false: leave yes out."
        )
    ]
    with pytest.raises(ConfigError, match=r"seed 3 follows no flag that takes it"):
        parse_config(SFTConfig, ["seed", "3"], command="train_sft")


def test_unknown_flags_and_wrong_values_are_reported_together() -> None:
    line = "--xyzzy --train.batch_size a --ds.zero_stage b"
    with pytest.raises(ConfigError) as caught:
        sft(line)
    assert len(caught.value.violations) == 3
    assert all(part in str(caught.value) for part in ("xyzzy", "'a'", "'b'", "3 mistakes"))


def test_defaults_are_not_among_what_the_user_gave() -> None:
    words = ["--ds.attn_implementation", "flash_attention_2"]
    given, _ = read_flags(SFTConfig, words, command="x")
    assert given == {"ds.attn_implementation": "flash_attention_2"}


def test_nothing_changes_a_configuration_after_it_was_made() -> None:
    config = sft()
    with pytest.raises(FrozenInstanceError):
        config.ds.zero_stage = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert amend(config, {"ds.lora.rank": 4}).ds.lora.rank == 4
    assert config.ds.lora.rank == 0


def test_notices_go_to_stderr_one_line_each_and_only_from_the_first_process(
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
def test_help_shows_every_section_and_loads_no_heavy_library(command: str) -> None:
    done = run_driver(command, "--help", "all")
    assert (done.returncode, done.stderr) == (0, "")
    shown = (
        ["--train.batch_size INT", "(128)", "LoRA adapters"]
        if command in TRAINING
        else ["--data.max_len INT", "(4096)" if command == "interactive_chat" else "(2048)"]
    )
    for text in (*shown, "--ds.param_dtype {bf16,fp16,fp32}", "--config"):
        assert text in done.stdout


def test_a_whole_parse_without_a_file_loads_no_heavy_library() -> None:
    done = run_driver("train_ppo_ray", *SMALLEST["train_ppo_ray"].split())
    assert done.returncode == 0, done.stderr


def test_a_mistake_ends_with_status_2_and_the_sentence_on_stderr() -> None:
    done = run_driver("train_sft", "--train.batchsize", "3")
    assert done.returncode == 2
    assert "Did you mean --train.batch_size" in done.stderr


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(SFTConfig, [], command="train_sft")
    text = str(caught.value)
    assert "--model.model_name_or_path must be given" in text
    assert "--data.dataset must be given" in text


@pytest.mark.parametrize("command", SMALLEST)
def test_the_smallest_command_lines_are_valid(command: str) -> None:
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
def test_words_after_a_switch_are_an_error_also_after_an_old_one(
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
def test_names_of_elsewhere_and_short_names_are_answered_with_ours(
    command: str, line: str, meant: str
) -> None:
    (sentence,) = violations(command, line)
    assert meant in sentence


def test_everything_that_is_wrong_comes_in_one_round() -> None:
    """The mistakes are of all kinds.

    They are an unknown name, an ambiguous one, a missing value, a wrong value, a refusal and a
    broken rule.
    """
    found = violations(
        "train_ppo_ray",
        (
            "--xyzzy --adam. 1 --reward.clip_range 5 --actor.adam.lr fast --critic.optim muon "
            "--rollout.temperature 0"
        ),
    )
    for part in (
        "--xyzzy",
        "--adam.",
        "clip_range takes two values",
        "'fast'",
        "--critic.optim muon is not",
        "is greedy",
    ):
        assert len([text for text in found if part in text]) == 1, part
    assert len(found) == 6


def test_what_follows_from_a_mistake_is_not_reported() -> None:
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
    assert len(caught.value.violations) == 1  # and nothing about a --train.batch_size of 128
    assert violations("train_ppo_ray", "--ring_attn_size 2") == [
        "--ds.ring_attn_size 2 is not available yet: use 1 and a smaller --data.max_len."
    ]


def test_old_names_take_one_line_however_many(capsys: pytest.CaptureFixture[str]) -> None:
    sft("--max_len 4096 --train_batch_size 256 --max_samples 5000 --zero_stage 2 --bf16")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "[notice] 5 flags have the names of older releases (--max_len, --train_batch_size, "
        "--max_samples"
    )
    assert "config.yaml in the run folder has today's names" in line


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
def test_help_finds_flags_of_choices_and_methods(
    root: type[Any], word: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(root, ["--help", word], command="command")
    assert found in capsys.readouterr().out


def test_help_of_estimator_names_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(PPOConfig, ["--help", "advantage.estimator"], command="train_ppo_ray")
    printed = " ".join(capsys.readouterr().out.split())
    for pair in ("gae: PPO", "reinforce: REINFORCE++", "rloo: RLOO", "group_norm: GRPO"):
        assert pair in printed
    assert "dr_grpo: Dr. GRPO" in printed


def test_short_help_has_what_is_required_first_and_a_word_finds_its_flags(
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
    assert "no flag with nonsense" in nothing and "--help all" in nothing
    assert len(printed("all").splitlines()) > 200
    for word in ("muon.lr", "critic.optim", "ring_attn_size"):
        assert " ".join(printed(word).split()).endswith("Not available yet."), word
