"""End-to-end tests of supervised fine-tuning.

The tests cover one process, both launchers, resuming after a kill, and invalid input.
"""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from openrlhf.cli.common import LAUNCHER
from openrlhf.cli.train_sft import main
from openrlhf.training.devices import free_port
from tests.e2e.commands import (
    as_arguments,
    column,
    default_schedule,
    finish,
    kill_when,
    launch,
    numbers,
    places,
    run,
    small_sft,
    steps_logged,
    write_rows,
)
from tests.models.test_proof import MIXING, SIZES
from tests.tiny import save_tiny_model, sayable

TRAIN_ROWS, EVAL_ROWS, BATCH, EPOCHS = 52, 13, 8, 5
STEPS = TRAIN_ROWS // BATCH * EPOCHS
EOS, TEMPLATE = "<eos>", "reverse {}="
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def task_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Return words of 1 to 12 letters, each with the reversed word as its answer."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 12))) for _ in range(count)]
    return [{"input": word, "output": word[::-1] + EOS} for word in words]


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create the module's model, dataset and datasets cache."""
    save_tiny_model(own_folder / "model")
    write_rows(own_folder / "train.jsonl", task_rows(TRAIN_ROWS, seed=1))
    write_rows(own_folder / "eval.jsonl", task_rows(EVAL_ROWS, seed=2))
    return own_folder


def sft_flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        **small_sft(workspace, folder, epochs=EPOCHS),
        "data.input_template": TEMPLATE,
        "eval.dataset": workspace / "eval.jsonl",
        "ckpt.save_steps": 10,
        **changes,
    }


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    """Complete a run without interruption."""
    folder = workspace / "whole"
    run("train_sft", sft_flags(workspace, folder))
    return folder


# ---- one process


def test_every_epoch_consists_of_full_batches_and_ends_with_an_evaluation(whole: Path) -> None:
    lines = [(row["step"], "eval/eval gpt_loss" in row) for row in numbers(whole)]
    expected = []
    for step in range(1, STEPS + 1):
        expected.append((step, False))
        if step % (TRAIN_ROWS // BATCH) == 0:
            expected.append((step, True))
    assert lines == expected


def test_model_learns_to_reverse_words(whole: Path) -> None:
    losses = column(whole, "train/gpt_loss")
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(64), abs=0.1)  # nearly uniform over 64 tokens
    assert losses[-1] < 2.5
    assert column(whole, "eval/eval gpt_loss")[-1] < 2.5


def test_learning_rate_matches_the_transformers_schedule(whole: Path) -> None:
    assert column(whole, "train/lr") == default_schedule(1e-2, STEPS)


def test_run_folder_contains_the_configuration_the_metrics_and_the_report(whole: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "report.html"):
        assert (whole / name).stat().st_size > 0
    report = (whole / "report.html").read_text()
    assert "gpt loss" in report.lower()
    texts = (whole / "texts.txt").read_text()
    assert (
        texts.startswith("Template: --data.input_template") and texts.count("⟦") == 2
    )  # two rows with one marked answer each
    assert html.escape(texts.splitlines()[1]) in report


def test_exported_model_has_the_logged_evaluation_loss_in_plain_transformers(
    whole: Path, workspace: Path
) -> None:
    logged = column(whole, "eval/eval gpt_loss")[-1]
    assert logged == pytest.approx(loss_in_transformers(whole / "model"), abs=2e-6)


def loss_in_transformers(model: Path) -> float:
    """Return an exported model's evaluation loss, computed in float64 without our code."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total, count = 0.0, 0
    for row in task_rows(EVAL_ROWS, seed=2):
        prompt = tokenizer(TEMPLATE.format(row["input"])).input_ids
        answer = tokenizer(row["output"]).input_ids
        with torch.no_grad():
            logits = hf(torch.tensor([prompt + answer])).logits[0]
        table = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        total -= float(table.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    return total / count


# ---- several processes


@pytest.mark.parametrize(
    ("launcher", "stage"),
    [
        pytest.param(("deepspeed", "--num_gpus", "2", "--module"), 2, id="deepspeed-zero2"),
        pytest.param(
            ("torchrun", "--nproc_per_node", "2", "-m"),
            3,
            id="torchrun-zero3",
            marks=pytest.mark.verify,
        ),
    ],
)
def test_two_processes_give_the_same_result_as_one(
    whole: Path, workspace: Path, launcher: tuple[str, ...], stage: int
) -> None:
    """Losses agree to 1e-4: sums are in a different order, and AdamW amplifies the difference."""
    folder = workspace / launcher[0]
    flags = sft_flags(workspace, folder, **{"ds.zero_stage": stage, "ckpt.save_steps": 20})
    launcher = (launcher[0], "--master_port", str(free_port()), *launcher[1:])
    run("train_sft", flags, launcher=launcher)
    check_numbers(folder, whole)
    assert column(folder, "train/grad_norm")[0] == pytest.approx(
        column(whole, "train/grad_norm")[0], rel=1e-5
    )
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32).state_dict()
        for path in (folder, whole)
    )
    for name, weight in theirs.items():
        if not name.endswith("k_proj.bias"):  # the gradient consists of rounding errors
            torch.testing.assert_close(ours[name], weight, atol=2e-3, rtol=0, msg=name)
    if stage == 3:
        check_that_one_process_goes_on(flags, folder, whole)


def check_numbers(folder: Path, whole: Path) -> None:
    for name in ("train/gpt_loss", "eval/eval gpt_loss", "train/lr"):
        assert column(folder, name) == pytest.approx(column(whole, name), abs=1e-4), name


def check_that_one_process_goes_on(flags: dict[str, Any], folder: Path, whole: Path) -> None:
    """Check that a single process can resume from step 20, which was saved by two processes.

    The first attempt to resume fails with an error that names the required flag.
    """
    for path in (folder / "checkpoints").glob("global_step*.manifest.json"):
        if path.name != "global_step20.manifest.json":
            path.unlink()
    shutil.rmtree(folder / "model")
    resumed = {**flags, "ckpt.load_enable": True}
    done = run("train_sft", resumed, status=2)
    assert (
        "2 process(es) with ZeRO stage 3" in done.errors
        and "--ds.use_universal_ckpt" in done.errors
    )
    run("train_sft", {**resumed, "ds.use_universal_ckpt": True})
    assert len(column(folder, "train/lr")) == STEPS
    check_numbers(folder, whole)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("deepspeed", "--num_gpus", "2", "--module"), marks=pytest.mark.verify),
        ("torchrun", "--nproc_per_node", "2", "-m"),
    ],
)
def test_broken_row_is_reported_only_once_by_two_processes(
    workspace: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    broken = [*task_rows(40, seed=1), {"input": None, "output": "a"}]
    flags = sft_flags(
        workspace, tmp_path, **{"data.dataset": write_rows(tmp_path / "broken.jsonl", broken)}
    )
    launcher = (launcher[0], "--master_port", str(free_port()), *launcher[1:])
    done = finish(launch("train_sft", flags, launcher))
    assert done.status != 0
    told = re.findall("^error: (.*)", done.printed + done.errors, re.MULTILINE)
    expected = (
        "column 'input': is null, not a string: the value is empty or this dataset "
        "does not have the column."
    )
    assert told == [f"{tmp_path}/broken.jsonl, row 41, {expected}"]


# ---- killed runs


def test_resumed_run_logs_the_same_metrics_as_an_uninterrupted_run(
    whole: Path, workspace: Path
) -> None:
    """The configuration file of the uninterrupted run is sufficient to start the second run.

    Metrics are identical to the last digit.
    """
    folder = workspace / "killed"
    flags = {"config": whole / "config.yaml", **places(folder)}
    process = launch("train_sft", flags)
    kill_when(process, lambda: steps_logged(folder) >= 13)
    before = numbers(folder)
    assert before == numbers(whole)[: len(before)]
    assert steps_logged(folder) < STEPS
    assert [file.name for file in (folder / "model").iterdir()] == [".lock"]
    run("train_sft", {**flags, "ckpt.load_enable": True, "run.dir": None})
    assert numbers(folder) == numbers(whole)
    ours, theirs = (path / "model" / "model.safetensors" for path in (folder, whole))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.verify
def test_resumed_run_with_dropout_logs_the_same_metrics_as_an_uninterrupted_run(
    workspace: Path,
) -> None:
    """An SFT or reward model run that is resumed within an epoch repeats the dropout masks."""
    save_tiny_model(workspace / "dropout", attention_dropout=0.3)
    pairs = [
        {"chosen": row["output"], "rejected": row["input"] + EOS} for row in task_rows(24, seed=3)
    ]
    write_rows(workspace / "pairs.jsonl", pairs)
    for command in ("train_sft", "train_rm"):
        folder = workspace / f"dropout-{command}"
        flags = sft_flags(workspace, folder) | {
            "model.model_name_or_path": workspace / "dropout",
            "train.max_epochs": 2,
            "ckpt.save_steps": 2,
        }
        if command == "train_rm":
            flags |= {"data.dataset": workspace / "pairs.jsonl", "eval.dataset": None}
            del flags["data.input_key"], flags["data.output_key"], flags["data.input_template"]
        run(command, flags)
        unbroken = numbers(folder)
        for path in (folder / "checkpoints").glob("global_step*.manifest.json"):
            if path.name != "global_step2.manifest.json":
                path.unlink()
        run(command, {**flags, "ckpt.load_enable": True, "run.dir": None, "ckpt.max_num": 9})
        assert numbers(folder) == unbroken, command


def test_resumed_run_uses_the_learning_rate_from_the_command_line(workspace: Path) -> None:
    """The learning rate in the checkpoint is ignored.

    The run reports flag values that are not used.
    """
    folder = workspace / "faster"
    flags = sft_flags(workspace, folder) | {"train.max_epochs": 1, "ckpt.save_steps": 3}
    run("train_sft", flags)
    (folder / "checkpoints" / "global_step6.manifest.json").unlink()
    done = run(
        "train_sft",
        flags | {"ckpt.load_enable": True, "adam.lr": 2e-2, "run.dir": workspace / "elsewhere"},
    )
    slow, fast = default_schedule(1e-2, 6), default_schedule(2e-2, 6)
    assert column(folder, "train/lr") == [*slow[:3], *fast[3:]]
    assert f"Ignoring --run.dir {workspace / 'elsewhere'}" in done.printed
    assert not (workspace / "elsewhere").exists()


def test_checkpoint_from_a_different_run_in_the_same_folder_is_rejected(
    whole: Path, workspace: Path
) -> None:
    """The two runs have the same number of rows, batch size, seed and layout.

    The error lists each difference.
    """
    write_rows(workspace / "others.jsonl", task_rows(TRAIN_ROWS, seed=4))
    others = {
        "data.dataset": workspace / "others.jsonl",
        "ckpt.load_enable": True,
        "run.dir": workspace / "grafted",
    }
    done = run("train_sft", sft_flags(workspace, whole, **others), status=2)
    assert "--ckpt.path" in done.errors
    assert re.search(
        r"rows of --data\.dataset, tokenized: was 52, \w+, now 52, \w+", done.errors
    ), done.errors
    assert "Traceback" not in done.errors


# ---- early stopping


def test_run_that_overfits_stops_early_and_exports_its_best_weights(
    workspace: Path,
) -> None:
    """The run evaluates after every second step, and its patience count survives a kill."""
    folder, patience = workspace / "overfitting", 3
    flags = sft_flags(workspace, folder) | {
        "adam.lr": 3e-2,
        "eval.steps": 2,
        "eval.patience": patience,
        "train.max_epochs": 100,
        "ckpt.save_steps": 3,
    }
    kill_when(launch("train_sft", flags), lambda: steps_logged(folder) >= 7)
    done = run("train_sft", {**flags, "ckpt.load_enable": True, "run.dir": None})
    losses = column(folder, "eval/eval gpt_loss")
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + patience
    assert steps_logged(folder) == 2 * len(losses)
    assert f"--eval.patience {patience} ends the run after step {2 * len(losses)}." in done.printed
    assert f"The export contains the weights of step {2 * (best + 1)}" in done.printed
    assert loss_in_transformers(folder / "model") == pytest.approx(min(losses), abs=2e-6)


# ---- a real dataset


def test_sft_in_bfloat16_learns_from_gsm8k_chat_messages(workspace: Path, data_dir: Path) -> None:
    lines = (data_dir / "gsm8k/train.jsonl").read_text().splitlines()[:64]
    rows = [{name: sayable(text) for name, text in json.loads(line).items()} for line in lines]
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
    ]
    dataset = write_rows(workspace / "gsm8k.jsonl", chats)
    folder = workspace / "gsm8k"
    changes = {
        "data.dataset": dataset,
        "data.input_key": "messages",
        "data.output_key": None,
        "data.apply_chat_template": True,
        "data.tokenizer_chat_template": CHAT_TEMPLATE,
        "data.max_len": 1024,
        "ds.param_dtype": "bf16",
        "ds.packing_samples": True,
        "eval.dataset": None,
        "train.max_epochs": 1,
    }
    done = run("train_sft", sft_flags(workspace, folder, **changes))
    assert "64 of 64 rows kept" in done.printed
    losses = column(folder, "train/gpt_loss")
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    exported = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    assert exported.dtype == torch.bfloat16


# ---- wrong input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.dataset": "nowhere.jsonl"}, r"--data\.dataset nowhere\.jsonl does not exist"),
        ({"data.output_key": "answer"}, r"no column 'answer', which --data\.output_key names"),
        (
            {"train.batch_size": 64, "train.micro_batch_size": 64},
            r"52 usable rows.*Lower --train\.batch_size 64",
        ),
        ({"data.max_length": 64}, r"no flag --data\.max_length\. Did you mean --data\.max_len\?"),
        ({"adam.lr": -1.0}, r"--adam\.lr"),
        ({"train.batch_size": 9}, r"--train\.batch_size 9.*--train\.micro_batch_size 2"),
        ({"data.apply_chat_template": True}, r"chat template"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_user_error_prints_a_single_message_and_exits_with_status_2(
    workspace: Path,
    changes: dict[str, Any],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        *LAUNCHER,
        "DS_ACCELERATOR",
        "OMP_WAIT_POLICY",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
    ):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # undo changes afterwards
        monkeypatch.delenv(name)
    folder = workspace / "mistaken"
    with pytest.raises(SystemExit) as ended:
        main(as_arguments(sft_flags(workspace, folder, **changes)))
    errors = capfd.readouterr().err
    assert ended.value.code == 2
    assert len(re.findall("^error: ", errors, re.MULTILINE)) == 1
    assert "Traceback" not in errors
    assert re.search(message, errors), errors
    assert not folder.exists()


def test_model_that_mixes_up_packed_texts_is_rejected_before_the_first_step(
    workspace: Path,
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("lfm2", **SIZES | MIXING["lfm2"])
    AutoModelForCausalLM.from_config(config).save_pretrained(workspace / "lfm2")
    AutoTokenizer.from_pretrained(workspace / "model").save_pretrained(workspace / "lfm2")
    flags = sft_flags(workspace, workspace / "mixed") | {
        "model.model_name_or_path": workspace / "lfm2",
        "ds.packing_samples": True,
    }
    done = run("train_sft", flags, status=2)
    assert re.search(
        r"packed into one row, and mixed the sequences.*Drop --ds\.packing_samples", done.errors
    ), done.errors
    assert "Traceback" not in done.errors and not (workspace / "mixed").exists()


def test_mismatches_between_the_model_the_tokenizer_and_the_template_are_reported_at_startup(
    whole: Path, workspace: Path
) -> None:
    """The tokenizer cannot encode the template.

    The end-of-text token is not the model's, and the prompt format differs from the training
    format.
    """
    model = workspace / "unlike"
    shutil.copytree(workspace / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(model)
    flags = sft_flags(workspace, workspace / "dry", dry_run=True) | {
        "data.input_template": "Straße {}="
    }
    done = run("train_sft", flags | {"model.model_name_or_path": model})
    assert (
        "[notice] --data.input_template: The tokenizer of" in done.errors
        and "'Straße ='" in done.errors
    )
    assert re.search(
        r"The tokenizer's end-of-text token is z \(\d+\), but .* lists \[\d+\]\.", done.errors
    ), done.errors
    assert f"optimizer step(s) of {BATCH} rows; {TRAIN_ROWS % BATCH} row(s) unused" in done.printed
    assert "Not checked: whether packing or padding changes the models' outputs." in done.printed
    reinforced = {
        "actor.model_name_or_path": whole / "model",
        "data.prompt_dataset": workspace / "train.jsonl",
        "data.label_key": "output",
        "data.max_len": 16,
        "rollout.max_new_tokens": 8,
        "reward.verifier": "math",
        "dry_run": True,
    }
    done = run("train_ppo_ray", reinforced)
    trained = (
        f"--actor.model_name_or_path {whole / 'model'} was trained with "
        f"--data.input_template ${TEMPLATE!r}"
    )
    assert f"{trained}, so this run uses that too" in done.errors
    assert re.search(
        rf"\d+ of {TRAIN_ROWS} prompts leave no room .* truncated to their last 8 tokens",
        done.errors,
    ), done.errors


def test_user_error_exits_with_status_2_and_prints_only_the_message(
    workspace: Path,
) -> None:
    done = run(
        "train_sft",
        sft_flags(workspace, workspace / "mistaken", **{"data.input_key": "question"}),
        status=2,
    )
    assert done.printed == ""
    assert done.errors.startswith("error: ")
    assert "--data.input_key" in done.errors and "Traceback" not in done.errors


# ---- long tests, run by `make verify`


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_run_repeatedly_killed_at_any_moment_logs_the_same_metrics_as_an_uninterrupted_run(
    whole: Path, workspace: Path
) -> None:
    """Each run is killed after a random fraction of a full run's duration, until one completes."""
    folder, draw = workspace / "haunted", random.Random(0)
    flags = {
        "config": whole / "config.yaml",
        **places(folder),
        "ckpt.save_steps": 1,
        "ckpt.load_enable": True,
    }
    kills = 0
    while True:
        process = launch("train_sft", flags)
        logged = steps_logged(folder)
        extra = draw.randint(1, 4)
        while process.poll() is None and steps_logged(folder) < min(logged + extra, STEPS - 1):
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        if steps_logged(folder) >= STEPS - 1:
            break
        process.kill()
        process.communicate()
        kills += 1
    assert finish(process).status == 0
    assert kills >= 2
    assert numbers(folder) == numbers(whole)
