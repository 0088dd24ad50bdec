"""Configuration files: reading them with --config, and writing them to the run folder.

Reading a written file back gives the same configuration.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.config.commands import Command
from openrlhf.config.flags import Flag, flags_of, value_at
from openrlhf.config.options import ConfigError, dump_yaml, parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from tests.config.commands import COMMANDS, ROOTS, ppo, read_flags, sft

CASES = [
    ("train_sft", ""),
    ("train_sft", "--train.batch_size 4 --ds.packing_samples --adam.betas 0.8 0.9"),
    ("train_sft", "--data.apply_chat_template --muon.no_nesterov --ckpt.max_mem 1e3"),
    ("train_ppo_ray", ""),
    ("train_ppo_ray", "--actor.eps_clip 0.1 --train.dynamic_batch_enable --rollout.top_k 5"),
    ("train_ppo_ray", "--algo.advantage.gamma 0.5 --vllm.engine_args={"
     '"a":{"b":[1,null]}} --rollout.seeded off --reward.on_error 0'),
    ("train_ppo_ray", "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 "
     "--vllm.disable_prefix_caching --train.colocate_actor_ref --actor.num_gpus_per_node 2"),
]  # fmt: skip


def load(command: str, file: Path, *flags: str):
    return parse_config(ROOTS[command], ["--config", str(file), *flags], command=command)


def written(config: Command, folder: Path) -> Path:
    """Write the configuration file of a run, and return its path."""
    file = folder / "config.yaml"
    file.write_text(dump_yaml(config, given_only=True))
    return file


@pytest.mark.parametrize(("command", "line"), CASES)
def test_written_file_is_read_back_as_the_same_configuration(
    command: str, line: str, tmp_path: Path
) -> None:
    config = {"train_sft": sft, "train_ppo_ray": ppo}[command](
        f"{line} --run.dir r --logger.wandb.run_name w"
    )
    again = load(command, file := written(config, tmp_path))
    assert again == config
    assert again.given == config.given
    assert dump_yaml(again) == dump_yaml(config)
    assert dump_yaml(again, given_only=True) == file.read_text()


def test_file_has_the_given_values_and_the_resolved_file_has_all_values() -> None:
    config = ppo("--pretrain m --actor.policy_loss_type gspo")
    given = yaml.safe_load(dump_yaml(config, given_only=True))
    assert given["actor"] == {"model_name_or_path": "m", "policy_loss_type": "gspo"}
    assert "vllm" not in given and "loss" not in given["algo"]
    resolved = yaml.safe_load(dump_yaml(config))
    assert (resolved["vllm"]["dtype"], resolved["algo"]["loss"]["aggregation"]) == (
        "bf16",
        "sequence",
    )


def test_resolved_file_is_refused_as_a_configuration_file(tmp_path: Path) -> None:
    """The derived values in the resolved file would not follow changes to other flags."""
    file = tmp_path / "config_resolved.yaml"
    file.write_text(dump_yaml(ppo("")))
    with pytest.raises(
        ConfigError,
        match=r"config_resolved\.yaml also contains derived values: use config\.yaml",
    ):
        load("train_ppo_ray", file)


# Each row has a run's flags, a flag that overrides the run's file, and the new derived value.
FOLLOWED = [
    ("", "--ds.param_dtype fp32", "vllm.dtype", "fp32"),
    ("", "--actor.policy_loss_type cispo", "actor.eps_clip_low_high", (1.0, 0.28)),
    ("", "--actor.policy_loss_type gspo", "algo.loss.aggregation", "sequence"),
    ("--algo.advantage.estimator gae", "--reward.model_name_or_path r", "critic.model_name_or_path",
     "r"),
    ("", "--vllm.num_engines 2", "vllm.max_engines", 2),
    ("", "--actor.eps_clip 0.3", "actor.eps_clip_low_high", (0.3, 0.3)),
    ("--train.colocate_actor_ref", "--actor.num_gpus_per_node 2", "ref.num_gpus_per_node", 2),
    ("--rollout.batch_size 256", "--rollout.batch_size 512", "rollout.vllm_generate_batch_size",
     512),
]  # fmt: skip


@pytest.mark.parametrize(("line", "change", "path", "value"), FOLLOWED)
def test_derived_values_follow_a_flag_that_overrides_the_run_file(
    line: str, change: str, path: str, value: object, tmp_path: Path
) -> None:
    config = load("train_ppo_ray", written(ppo(line), tmp_path), *change.split())
    assert value_at(config, path) == value


def test_explicit_values_in_a_run_file_are_not_derived_again(tmp_path: Path) -> None:
    line = "--ds.param_dtype fp32 --vllm.dtype bf16 --actor.eps_clip_low_high 0.1 0.2"
    config = load(
        "train_ppo_ray", written(ppo(line), tmp_path), "--actor.policy_loss_type", "cispo"
    )
    assert (config.vllm.dtype, config.actor.eps_clip_low_high) == ("bf16", (0.1, 0.2))


def test_run_file_prints_the_same_notices_as_the_original_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("", "--algo.advantage.estimator gae --critic.freezing_steps 2", "--rollout.only"):
        file = written(ppo(line), tmp_path)
        said = capsys.readouterr().err
        load("train_ppo_ray", file)
        assert capsys.readouterr().err == said


def test_run_folder_is_not_reused_without_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(sft(f"--run.dir {tmp_path} --ckpt.output_dir {tmp_path}/model"), tmp_path)
    assert load("train_sft", file).run.dir.startswith("./runs/train_sft-")
    said = capsys.readouterr().err
    assert f"--run.dir {tmp_path}" in said and str(file) in said
    assert load("train_sft", file, "--run.dir", str(tmp_path)).run.dir == str(tmp_path)


def test_keys_in_a_configuration_file_may_be_nested_or_dotted(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model.model_name_or_path: m\n"
        "data: {dataset: d, output_key: a}\n"
        "ds:\n  lora.alpha: 8\n  lora:\n    dropout: 0.5\n"
    )
    config = load("train_sft", file)
    assert (config.ds.lora.alpha, config.ds.lora.dropout) == (8, 0.5)
    assert config.data.dataset == "d"


def test_flags_take_precedence_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(sft("--train.seed 7 --adam.lr 1e-3")))
    config = load("train_sft", file, "--train.seed", "8")
    assert (config.train.seed, config.adam.lr) == (8, 1e-3)


def test_yaml_value_types_are_converted(tmp_path: Path) -> None:
    """YAML reads `1e-6` as a string, `1` as an integer and `on` as a boolean."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(ppo()))
    content = yaml.safe_load(file.read_text())
    content["rollout"]["seeded"] = True
    content["algo"]["kl"]["init_coef"] = 1
    content["actor"]["adam"] = {"lr": "1e-6"}
    content["logger"]["wandb"]["project"] = 7
    content["train"]["batch_size"] = 64.0
    file.write_text(yaml.safe_dump(content))
    config = load("train_ppo_ray", file)
    assert config.rollout.seeded == "on"
    assert config.algo.kl.init_coef == 1.0
    assert config.actor.adam.lr == 1e-6
    assert config.logger.wandb.project == "7"
    assert config.train.batch_size == 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trian: {batch_size: 3}", "run.yaml: train_sft has no flag trian.batch_size. Did you mean "
         "train.batch_size"),
        ("pretrain: m", "train_sft has no flag pretrain. Did you mean model.model_name_or_path?"),
        ("train: {batch_size: [1]}", "run.yaml: --train.batch_size takes a whole number, not [1]"),
        ("train: {seed: null}", "--train.seed takes a whole number, not None"),
        ("ds: {packing_samples: 1}", "--ds.packing_samples is a switch: it must be true or false"),
        ("adam: {betas: [1, 2, 3]}", "--adam.betas takes two numbers, not 3"),
        ("train.seed: 1\ntrain: {seed: 2}", "run.yaml: train.seed appears twice"),
        ("train:\n  seed: 1\ntrain:\n  batch_size: 4", "run.yaml: train appears twice"),
        ("ds: {lora: {rank: 1, alpha: 8, rank: 2}}", "run.yaml: ds.lora.rank appears twice"),
        ("plugin: true", "run.yaml: --plugin takes text, not True"),
        ("plugin:\n-", "run.yaml: --plugin takes text, not None"),
        ("- 1", "run.yaml contains a list, not names and values"),
        ("a: [", "run.yaml cannot be read"),
        ("train:\n  a: [", 'run.yaml", line 2'),
        ("train:\n  seed: !unknown 1", 'run.yaml", line 2'),
    ],
)  # fmt: skip
def test_error_in_a_file_names_the_file_and_the_key(
    text: str, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("train_sft", file)
    assert sentence in str(caught.value)


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*gone\.yaml cannot be read"):
        load("train_sft", tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config"], "--config takes one file, not nothing"),
        (["--config", "--train.seed", "1"], "--config takes one file, not nothing"),
        (["--config="], "--config takes one file, not nothing"),
        (["--config", "a.yaml", "--config", "b.yaml"], "one file, not a.yaml and b.yaml"),
    ],
)
def test_config_flag_requires_exactly_one_file(words: list[str], sentence: str) -> None:
    """Otherwise, the run would silently use the defaults, or only the last file."""
    with pytest.raises(ConfigError) as caught:
        parse_config(SFTConfig, words, command="train_sft")
    assert sentence in str(caught.value)


def test_merged_sections_of_a_file_may_set_the_same_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: &first {seed: 1, max_epochs: 3}\neval: {<<: *first, seed: 2}")
    with pytest.raises(ConfigError) as caught:
        load("train_sft", file)
    assert "appears twice" not in str(caught.value)


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--data\.dataset is required"):
        load("train_sft", file)


def test_null_value_means_not_given_unless_the_flag_has_a_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(ppo()))
    text = yaml.safe_load(file.read_text())
    text["actor"]["eps_clip_low_high"] = text["vllm"]["max_engines"] = None
    file.write_text(yaml.safe_dump(text))
    assert load("train_ppo_ray", file).actor.eps_clip_low_high == (0.2, 0.2)
    file.write_text(dump_yaml(sft()))
    text = yaml.safe_load(file.read_text())
    text["data"]["input_template"] = None
    file.write_text(yaml.safe_dump(text))
    assert load("train_sft", file).data.input_template is None


def test_flags_that_concern_only_a_single_launch_are_not_written() -> None:
    written = yaml.safe_load(dump_yaml(sft("--dry_run --local_rank 3 --logger.wandb.key secret")))
    assert "dry_run" not in written and "local_rank" not in written
    assert "key" not in written["logger"]["wandb"]


def test_values_in_a_file_count_as_given(tmp_path: Path) -> None:
    file = written(
        ppo("--ref.num_gpus_per_node 1 --train.colocate_actor_ref --algo.kl.init_coef 0"), tmp_path
    )
    config = load("train_ppo_ray", file, "--actor.num_gpus_per_node", "2")
    assert config.ref.num_gpus_per_node == 1  # the file's value, not the policy's GPU count
    assert type(config) is PPOConfig and type(sft()) is SFTConfig


# ---- paths


def path_flags(*kinds: str) -> list[tuple[str, str]]:
    flags = [
        (command, flag) for command, root in COMMANDS.items() for flag in flags_of(root).values()
    ]
    return [(command, flag.path) for command, flag in flags if flag.holds in kinds]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("command", "path"), path_flags("model", "dataset", "place"))
def test_leading_tilde_is_expanded_in_a_file_and_after_an_equals_sign(
    command: str, path: str, home: Path
) -> None:
    """Shells expand a tilde only at the beginning of a word, so the command must expand it."""
    place, file = home / "x.py", home / "run.yaml"
    place.write_text("")
    file.write_text(f"{path}: ~/x.py")
    for word in (f"--{path}=~/x.py", "--config=~/run.yaml"):
        given, _ = read_flags(COMMANDS[command], [word], command=command)
        assert given[path] in (str(place), (str(place),))


@pytest.mark.parametrize(("command", "path"), path_flags("model", "dataset"))
def test_tilde_is_expanded_in_each_part_of_a_comma_separated_list(
    command: str, path: str, home: Path
) -> None:
    words = [f"--{path}", "~/a.jsonl@x, ~nobody-here/b,c~/~,https://~/d"]
    given, _ = read_flags(COMMANDS[command], words, command=command)
    assert given[path] == f"{home}/a.jsonl@x, ~nobody-here/b,c~/~,https://~/d"


def test_comma_in_a_single_path_is_part_of_the_path(home: Path) -> None:
    assert sft("--run.dir=~/a,~/b").run.dir == f"{home}/a,~/b"


def test_written_files_contain_paths_with_expanded_tildes(home: Path) -> None:
    config = sft("--ckpt.path=~/c")
    assert CheckpointManager(config.ckpt).root == home / "c"
    assert yaml.safe_load(dump_yaml(config, given_only=True))["ckpt"]["path"] == f"{home}/c"


@pytest.mark.parametrize("command", COMMANDS)
def test_flag_whose_help_mentions_files_or_folders_declares_its_content(command: str) -> None:
    def names_a_path(flag: Flag) -> bool:
        words = flag.help.lower().replace(",", " ").replace(".", " ").split()
        return flag.kind is str and bool({"file", "files", "folder", "folders", "py"} & set(words))

    flags = [
        flag for flag in flags_of(COMMANDS[command]).values() if not flag.path.endswith("split")
    ]  # `split` flags name a split, not a file
    assert [flag.path for flag in flags if names_a_path(flag) and not flag.holds] == []
