"""Pipelines: the file format, errors before the first stage runs, and which stages rerun."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from openrlhf.cli.main import main
from openrlhf.config import machine
from openrlhf.config.flags import ConfigError, amend, flags_of
from openrlhf.config.stages import STAGE_COMMANDS
from openrlhf.data.feedback import PreferenceDataset
from openrlhf.data.layouts import recognise
from openrlhf.launch.pipeline import Pipeline
from openrlhf.launch.pipeline_file import Stage, read_stages
from openrlhf.launch.pipeline_report import interval, write_pipeline_report
from tests.config.commands import ROOTS
from tests.data.small import PLAIN_CHAT, build_tokenizer
from tests.ranks import ROOT

MODEL = "model.model_name_or_path: m, data.dataset: d"
EXAMPLES = sorted((ROOT / "examples/pipelines").glob("*.yaml"))
CHAIN = """\
settings:
  small: {size: 1}
  large: {size: 2}
---
stages:
  rows: {run: "cp SOURCE ${rows}/rows.jsonl"}
  copy: {run: "cp ${rows}/rows.jsonl ${copy}/size{{ size }}.jsonl"}
  other: {run: "touch ${other}/there"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a pipeline of three stages that copy files.

    The third stage does not use the results of the first two.
    """
    (tmp_path / "source.jsonl").write_text("one\n")
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN.replace("SOURCE", str(tmp_path / "source.jsonl")))
    return path


def pipeline(file: Path, *words: str) -> None:
    main(["pipeline", str(file), "--run.dir", str(file.parent / "run"), *words])


def printed_about(capfd: pytest.CaptureFixture[str], stage: str) -> str:
    """Return the output about a stage that was printed since this function was last called."""
    lines = capfd.readouterr().out.splitlines()
    return next(line.removeprefix(f"{stage}: ") for line in lines if line.startswith(f"{stage}: "))


def states(capfd: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = [line.partition(": ") for line in capfd.readouterr().out.splitlines()]
    return {
        name: words.partition(".")[0].partition(";")[0]
        for name, _, words in lines
        if name in ("rows", "copy", "other")
    }


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("stages:\n  a: {run: x}\n  a: {run: y}", "stages.a"),
        ("stages:\n  a: {command: sft, flags: {train: {seed: 1, seed: 2}}}", "train.seed"),
        ("settings: {one: {size: 1}, one: {size: 2}}\n---\nstages: {a: {run: x}}", "settings.one"),
    ],
)
def test_key_that_appears_twice_is_an_error(text: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"stages\.yaml: .*{path} appears twice"):
        read_stages(file, "")


def test_second_run_skips_finished_stages(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipeline(file)
    assert states(capfd) == {"rows": "runs", "copy": "runs", "other": "runs"}
    assert (file.parent / "run/copy/size1.jsonl").read_text() == "one\n"
    pipeline(file)
    assert states(capfd) == {"rows": "done", "copy": "done", "other": "done"}


def test_changed_input_file_reruns_its_stage_and_dependent_stages(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline(file)
    capfd.readouterr()
    (file.parent / "source.jsonl").write_text("two\n")
    pipeline(file, "--dry_run")
    assert states(capfd) == {"rows": "runs again", "copy": "runs again", "other": "done"}
    assert (file.parent / "run/copy/size1.jsonl").read_text() == "one\n"  # a dry run
    pipeline(file)
    assert states(capfd) == {"rows": "runs again", "copy": "runs again", "other": "done"}
    assert (file.parent / "run/copy/size1.jsonl").read_text() == "two\n"
    assert (file.parent / "run/earlier/1/rows/rows.jsonl").read_text() == "one\n"


def test_changed_settings_rerun_only_stages_that_use_them(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline(file)
    capfd.readouterr()
    pipeline(file, "--settings", "large")
    assert states(capfd) == {"rows": "done", "copy": "runs again", "other": "done"}
    assert [path.name for path in (file.parent / "run/copy").iterdir()] == ["size2.jsonl"]


def test_failed_stage_ends_the_pipeline_with_its_exit_status_and_reruns(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text()
    file.write_text(text.replace("touch ${other}/there", "python -c 'raise SystemExit(7)'"))
    with pytest.raises(SystemExit) as ended:
        pipeline(file)
    printed = capfd.readouterr()
    assert ended.value.code == 7
    assert "stage other failed with exit status 7" in printed.err
    assert "the same command" in printed.err
    with pytest.raises(SystemExit):
        pipeline(file)
    assert states(capfd) == {"rows": "done", "copy": "done", "other": "runs again"}
    file.write_text(text)
    pipeline(file)
    assert states(capfd)["other"] == "runs again"


def test_stage_reruns_if_its_result_is_missing(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline(file)
    capfd.readouterr()
    (file.parent / "run/copy").rename(file.parent / "elsewhere")
    pipeline(file)
    assert states(capfd) == {"rows": "done", "copy": "runs again", "other": "done"}


def test_missing_result_of_failed_stage_is_not_reported_for_later_stages(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, switch = tmp_path / "half.yaml", tmp_path / "switch"
    program = f"import os, sys; sys.exit(0 if os.path.exists({str(switch)!r}) else 5)"
    made = f'  made: {{run: "python -c {json.dumps(json.dumps(program))[1:-1]}"}}\n'
    file.write_text(
        "stages:\n"
        f"{made}"
        f"  rm: {{command: rm, flags: {{{MODEL}, eval.dataset: '${{made}}/e.jsonl'}}}}\n"
    )
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            pipeline(file)
        assert ended.value.code == 5, capfd.readouterr().err


def test_stage_name_may_equal_a_key_of_the_pipeline_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "named.yaml"
    file.write_text(
        "stages:\n"
        "  run: {run: 'touch ${run}/there'}\n"
        "  copy: {run: 'cp ${run}/there ${copy}/there'}\n"
    )
    for state in ("runs", "done"):
        pipeline(file)
        assert printed_about(capfd, "copy") == state


def test_relative_path_to_pipeline_file_does_not_rerun_stages(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(file.read_text().replace(f"cp {file.parent}", "cp {{ here }}"))
    pipeline(file)
    capfd.readouterr()
    monkeypatch.chdir(file.parent)
    main(["pipeline", file.name, "--run.dir", "run"])
    assert states(capfd) == {"rows": "done", "copy": "done", "other": "done"}


def test_stage_that_exits_without_a_result_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text(f"stages:\n  rm: {{command: rm, launcher: 'true', flags: {{{MODEL}}}}}\n")
    with pytest.raises(SystemExit) as ended:
        pipeline(file)
    assert ended.value.code == 1
    error = capfd.readouterr().err
    assert "stage rm " in error and str(tmp_path / "run/rm/model") in error


def test_run_folder_may_have_spaces_and_quotes_in_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "odd.yaml", tmp_path / "plain and: 'quoted' #"
    second = (
        f"{{command: rm, launcher: 'true', flags: {{{MODEL}, eval.dataset: '${{made}}/there'}}}}"
    )
    file.write_text(f"stages:\n  made: {{run: 'touch \"${{made}}/there\"'}}\n  rm: {second}\n")
    with pytest.raises(SystemExit):
        main(["pipeline", str(file), "--run.dir", str(folder)])
    flags = yaml.safe_load((folder / "rm.yaml").read_text())
    assert flags["eval.dataset"] == str(folder / "made/there")
    # The launcher `true` does not write a model.
    assert str(folder / "rm/model") in capfd.readouterr().err


def test_failed_program_reruns_in_an_empty_folder(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = file.parent / "half.py"
    failing.write_text("import sys; open(sys.argv[1] + '/half', 'x'); sys.exit(3)")
    file.write_text(
        file.read_text().replace("touch ${other}/there", f"python {failing} ${{other}}")
    )
    for state in ("runs", "runs again"):
        with pytest.raises(SystemExit) as ended:
            pipeline(file)
        assert (ended.value.code, states(capfd)["other"]) == (3, state)


def test_rejected_second_pipeline_does_not_rewrite_stage_flags(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "run").mkdir()
    file.write_text(f"stages:\n  rm: {{command: rm, flags: {{{MODEL}}}}}\n")
    with open(file.parent / "run/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            pipeline(file)
    assert not (file.parent / "run/rm.yaml").exists()
    assert str(file.parent / "run") in capfd.readouterr().err


def test_second_pipeline_in_the_same_folder_is_rejected(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nested = f"python -m openrlhf.cli.main pipeline {file} --run.dir {file.parent / 'run'}"
    file.write_text(file.read_text().replace("touch ${other}/there", nested))
    with pytest.raises(SystemExit) as ended:
        pipeline(file)
    assert ended.value.code == 2
    assert (
        f"--run.dir {file.parent / 'run'} is in use by process {os.getpid()} "
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("sft: {command: sft, flags: {%s, data.output_key: o, train.batch_sise: 8}}",
         r"sft: .*train\.batch_sise.*train\.batch_size"),
        ("sft: {command: sft, flags: {%s, data.output_key: o, train.batch_size: many}}",
         r"sft: --train\.batch_size .*many"),
        ("sft: {command: sft, flags: {%s, data.output_key: o, train.batch_size: 0}}",
         r"sft: --train\.batch_size .*0"),
        ("rm: {command: rm, flags: {data.dataset: d}}", r"rm: --model\.model_name_or_path"),
        ("rm: {command: rm, flags: {%s, eval.dataset: ./nowhere.jsonl}}",
         r"rm: --eval\.dataset \./nowhere\.jsonl"),
        ("rm: {command: rm, flags: {%s, run.dir: mine}}", r"rm: .*--run\.dir"),
        ("rm: {command: rmm, flags: {%s}}", "rm: .* rmm .*sft, rm, dpo"),
        ("rm: {command: rmm, flags: {%s}}\n"
         "  later: {command: rm, flags: {model.model_name_or_path: '${rm}', data.dataset: d}}",
         "rm: .* rmm "),
        ("rm: {command: rm, flags: {%s, ref.model_name_or_path: '${sft}'}}",
         r"rm: \$\{sft\} .*first"),
        ("rm: {run: ls, command: rm}", "rm: .*`command` or `run`"),
        ("a.b: {run: ls}", r"a\.b: .*name"),
        ("earlier: {run: ls}", "earlier: .*name"),
        ("rm: {comand: rm}", "comand"),
        ("rm: {run: '{{ nowhere }}'}", "'nowhere' is undefined"),
        ("rm: [", r"wrong\.yaml.*`stages`"),
        ("first: {run: ls}", r"stages\.first appears twice"),
        ("a: {run: ls, flags: {seed: 1}}", "a: `flags`"),
        ("a: {run: ls, launcher: torchrun}", "a: .*`launcher`"),
        ("a: {command: rm, flags: [seed]}", "a: `flags` .*list"),
        ("a: {run: nosuchprogram x}", "a: .*nosuchprogram"),
        ("a: {command: rm, launcher: nosuchrun, flags: {%s}}", "a: .*nosuchrun"),
        ("a: {run: 'echo \"'}", "a: .*No closing quotation"),
        ("a: {run: [echo, x]}", r"a: run \['echo', 'x'\]"),
    ],
)  # fmt: skip
def test_errors_name_file_stage_and_flag_before_any_stage_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stages: str, message: str
) -> None:
    file = tmp_path / "wrong.yaml"
    if "%s" in stages:
        stages = stages % MODEL
    file.write_text(f"stages:\n  first: {{run: 'touch ${{first}}/there'}}\n  {stages}")
    with pytest.raises(SystemExit) as ended:
        pipeline(file)
    errors = capfd.readouterr().err
    assert ended.value.code == 2 and str(file) in errors
    assert re.search(message, errors, re.DOTALL)
    assert not (tmp_path / "run/first").exists()


@pytest.mark.parametrize(
    "text",
    ["", "one\ntwo\n", "- a\n- b\n", "stages: [a, b]\n", "stages: ls\n", "a: 1\n---\nstages: {}\n"],
)
def test_file_that_is_not_a_pipeline_raises_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "other"))):
        read_stages(tmp_path / "other", "")


def test_errors_of_all_stages_are_reported_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        "stages:\n  one: {command: rm, flags: {data.dataset: d}}\n  two: {command: x}\n"
    )
    with pytest.raises(SystemExit):
        pipeline(file)
    errors = capfd.readouterr().err
    assert "2 mistakes" in errors and "stage one" in errors and "stage two" in errors


def test_unknown_settings_error_lists_available_settings(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--settings huge .*small, large"):
        read_stages(file, "huge")


@pytest.mark.parametrize("settings", ["laptop", "cluster"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_pipeline_has_valid_flags(
    example: Path,
    settings: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: 8 if settings == "cluster" else 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(ROOT)
    main(
        ["pipeline", str(example), "--settings", settings, "--run.dir", str(tmp_path), "--dry_run"]
    )
    stages = read_stages(example, settings)
    assert capfd.readouterr().out.splitlines() == [f"{stage.name}: runs" for stage in stages]


@pytest.mark.parametrize("settings", ["laptop", "cluster"])
def test_methods_in_compare_example_train_on_the_same_number_of_answers(settings: str) -> None:
    stages = {
        stage.name: stage
        for stage in read_stages(ROOT / "examples/pipelines/compare.yaml", settings)
    }

    def value(name: str, path: str) -> int:
        return stages[name].values.get(path, flags_of(stages[name].root)[path].default)

    def answers(name: str) -> int:
        source = name
        if name == "rs_1":  # rs_1 trains on the best answer to each prompt of `answers_1`
            source = "answers_1"
        rows = value(source, "data.max_samples")
        command = stages[name].command
        if command == "ppo":
            samples = value(name, "rollout.n_samples_per_prompt")
            return rows * samples * value(name, "train.num_episodes")
        if command in ("dpo", "kto"):
            rows *= 2
        return rows * value(name, "train.max_epochs")

    counts = {name: answers(f"{name}_1") for name in ("sft", "dpo", "kto", "rs", "ppo", "grpo")}
    assert len(set(counts.values())) == 1, counts


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]
HH = "\n\nHuman: q\n\nAssistant: {}"
# One row from each public preference dataset, in the format described on its dataset card.
PAIRS_OF_THE_HUB = {
    "OpenRLHF/preference_dataset_mixture2_and_safe_pku": {
        "chosen": TURNS,
        "rejected": [TURNS[0], {**TURNS[1], "content": "no"}],
    },
    "HuggingFaceH4/ultrafeedback_binarized": {
        "prompt": "q",
        "chosen": TURNS,
        "rejected": [TURNS[0], {**TURNS[1], "content": "no"}],
        "messages": TURNS,
    },
    "Anthropic/hh-rlhf@harmless-base": {"chosen": HH.format("ok"), "rejected": HH.format("no")},
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_reads_public_preference_pairs_with_its_flags(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", lambda: 8)
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    for stage in read_stages(example, "cluster"):
        name = str(stage.values.get("data.dataset", "$"))
        if stage.command in ("rm", "dpo", "kto") and not name.startswith("$"):
            rows = Dataset.from_list([PAIRS_OF_THE_HUB[name]])
            config = amend(stage.root(), stage.values | {"given": stage.values})
            pair = PreferenceDataset(
                rows, tokenizer, recognise(rows, config, "pairs"), needs_prompt=True
            )[0]
            for tokens, answer in ((pair.chosen, "ok"), (pair.rejected, "no")):
                text = "".join(tokenizer.convert_ids_to_tokens(tokens))
                assert text == f"<|user|>q<|end|>\n<|assistant|>{answer}<|end|>", name


def test_every_command_with_a_result_can_be_a_stage() -> None:
    known = {stage.command for stage in STAGE_COMMANDS.values()}
    assert ROOTS.keys() - known <= {"serve_rm", "interactive_chat"}


def test_report_has_row_per_stage_and_confidence_intervals_over_seeds(tmp_path: Path) -> None:
    stages: list[Stage] = []
    for seed, passed in enumerate((0.4, 0.5, 0.6)):
        folder = tmp_path / f"dpo{seed}"
        folder.mkdir()
        row = {"step": 0, "time": 0.0, "eval/eval_sort_pass1": passed}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "report.html").write_text("its own")
        stages.append(Stage(name=folder.name, command="eval", group="DPO"))
    unfinished = Stage(name="rm", command="rm")
    seconds = dict.fromkeys(("dpo0", "dpo1", "dpo2"), 7.0)
    page = write_pipeline_report(tmp_path, [*stages, unfinished], seconds, title="t").read_text()
    assert "<td>rm</td>" not in page
    # the 95 % margin of error is 4.303 * 0.1 / sqrt(3) = 0.248
    assert all(
        text in page
        for text in ("sort pass@1 0.400", "<td>DPO</td><td>3</td><td>0.500 ± 0.248</td>")
    )
    assert 'href="dpo2/report.html"' in page
    assert (interval([]), interval([0.25]), interval([1.0, 3.0])) == ("", "0.250", "2.000 ± 12.7")


def test_results_trained_by_later_stages_keep_float32_weights(tmp_path: Path) -> None:
    """Adapters and merged models keep float32 weights too, unless the file sets the flag."""
    file = tmp_path / "chain.yaml"
    data = "data.dataset: d.jsonl"
    file.write_text(
        "stages:\n"
        f"  sft: {{command: sft, flags: {{model.model_name_or_path: m, {data}}}}}\n"
        f"  adapter: {{command: sft, flags: {{model.model_name_or_path: '${{sft}}', {data}, "
        f"ds.lora.rank: 4}}}}\n"
        "  merged: {command: lora_combiner, flags: {model_path: '${sft}', lora_path: "
        "'${adapter}'}}\n"
        f"  given: {{command: sft, flags: {{model.model_name_or_path: '${{merged}}', {data}, "
        f"ckpt.export_fp32: false}}}}\n"
        f"  last: {{command: dpo, flags: {{model.model_name_or_path: '${{given}}', {data}}}}}\n"
        "  answers: {command: batch_inference, flags: {model.model_name_or_path: '${last}'}}\n"
    )
    chain = Pipeline(file=file, folder=tmp_path, stages=read_stages(file, ""))
    kept = {stage.name: dict(chain.precision(stage)) for stage in chain.stages if stage.command}
    wide = {"ckpt.export_fp32": True}
    assert kept == {
        "sft": wide,
        "adapter": wide,
        "merged": {"ds.param_dtype": "fp32"},
        "given": {},
        "last": {},
        "answers": {},
    }


@pytest.mark.parametrize(
    "flag",
    [
        "logger.wandb.key: abc",
        "vllm.engine_args: {hf_token: abc}",
        "reward.remote_url: 'http://a:b@host'",
    ],
)
def test_flags_file_containing_a_secret_is_private(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(
        f"stages:\n  rl: {{command: ppo, flags: {{actor.model_name_or_path: m, {flag}}}}}\n"
    )
    [stage] = read_stages(file, "")
    flags = Pipeline(file=file, folder=tmp_path, stages=[stage]).write_flags(stage)
    assert flags.stat().st_mode & 0o077 == 0


def test_record_contains_no_secrets_and_flags_file_is_private(tmp_path: Path) -> None:
    """An older release's record, which contains the secret, is treated as equal to a new record."""
    url = "http://me:hunter2@host/get_reward?token=hunter2"
    file = tmp_path / "one.yaml"
    file.write_text(
        "stages:\n"
        f"  rl: {{command: ppo, flags: {{actor.model_name_or_path: m, data.prompt_dataset: d, "
        f"reward.remote_url: '{url}'}}}}\n"
    )
    [stage] = read_stages(file, "")
    made = Pipeline(file=file, folder=tmp_path, stages=[stage])
    flags = made.write_flags(stage)
    assert yaml.safe_load(flags.read_text())["reward.remote_url"] == url
    assert flags.stat().st_mode & 0o077 == 0
    inputs = made.inputs(stage)
    assert "hunter2" not in json.dumps(inputs)
    written = inputs | {"--reward.remote_url": url}
    (tmp_path / "rl.json").write_text(
        json.dumps({"inputs": written, "seconds": 1.0, "finished": 1.0})
    )
    assert made.record(stage)["inputs"] == inputs
