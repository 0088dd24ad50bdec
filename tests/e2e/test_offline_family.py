"""End-to-end tests of DPO, KTO, process reward models and distillation.

The tests cover learning, resuming after a kill, and invalid input.
"""

from __future__ import annotations

import json
import math
import random
import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.commands import (
    as_arguments,
    column,
    kill_when,
    launch,
    numbers,
    places,
    run,
    samples,
    small_grpo,
    steps_logged,
    write_rows,
)
from tests.goldens.record import make_models
from tests.goldens.rows import EOS, words
from tests.openai_server import openai_server
from tests.reference.preferences import answer_loss, pair_loss
from tests.tiny import character_tokenizer, save_tiny_model

TEMPLATE, BATCH = "say {}=", 16
TRAIN_ROWS, EVAL_ROWS = 96, 13
STEP, RIGHT, WRONG = "?", "+", "-"


def digits(word: str) -> str:
    """Return the alphabet positions of a word's letters."""
    return "".join(str(ord(letter) - ord("a")) for letter in word)


def rows_of(task: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return toy data: correct answers repeat the word, and wrong answers consist of digits.

    A reasoning step is correct if it consists of one of the first letters of the alphabet.
    """
    draw = random.Random(seed)
    if task == "dpo":
        return [
            {"prompt": word, "chosen": word + EOS, "rejected": digits(word) + EOS}
            for word in words(count, seed)
        ]
    if task == "kto":
        good = [draw.random() < 0.5 for _ in range(count)]
        return [
            {
                "input": word,
                "output": (word if desirable else digits(word)) + EOS,
                "label": desirable,
            }
            for word, desirable in zip(words(count, seed), good, strict=True)
        ]
    if task == "prm":
        rows = []
        for _ in range(count):
            steps = draw.choices("abcdefgh", k=3)
            labels = [RIGHT if letter in "abcd" else WRONG for letter in steps]
            rows.append({"input": "".join(letter + STEP for letter in steps), "label": labels})
        return rows
    return [{"input": word, "output": word + EOS} for word in words(count, seed)]


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Return the module's workspace."""
    return make_workspace(own_folder)


def make_workspace(own_folder: Path) -> Path:
    """Create a tiny model, a teacher with confident predictions, and data for each task."""
    make_models(own_folder)
    for task in ("dpo", "kto", "prm", "kd"):
        write_rows(own_folder / f"{task}.jsonl", rows_of(task, TRAIN_ROWS, seed=1))
        write_rows(own_folder / f"{task}-eval.jsonl", rows_of(task, EVAL_ROWS, seed=2))
    return own_folder


OWN: dict[str, dict[str, Any]] = {
    "dpo": {"data.prompt_key": "prompt", "data.input_template": TEMPLATE, "adam.lr": 3e-3},
    "kto": {
        "data.output_key": "output",
        "data.input_template": TEMPLATE,
        "kto.beta": 0.3,
        "adam.lr": 3e-3,
    },
    "prm": {"prm.placeholder_token": STEP, "prm.reward_tokens": [RIGHT, WRONG], "adam.lr": 1e-2},
    "kd": {"data.input_template": TEMPLATE, "kd.coef": 0.9, "adam.lr": 1e-2},
    "rm": {"data.prompt_key": "prompt", "data.input_template": TEMPLATE, "adam.lr": 3e-3},
}


def flags_of(task: str, workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    teacher = {"kd.teacher_model": workspace / "teacher"} if task == "kd" else {}
    rows = "dpo" if task == "rm" else task
    return {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / f"{rows}.jsonl",
        "data.max_len": 32,
        "eval.dataset": workspace / f"{rows}-eval.jsonl",
        "eval.split": "train",
        "train.batch_size": BATCH,
        "train.micro_batch_size": 8,
        "train.max_epochs": 3,
        "ds.param_dtype": "fp32",
        **OWN[task],
        **teacher,
        **places(folder),
        **changes,
    }


# ---- each command compared with plain Transformers


class Plain:
    """An exported model in plain Transformers, in float64, without our code."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def table(self, tokens: list[int]) -> torch.Tensor:
        """Return the next-token log-probabilities at each position."""
        with torch.no_grad():
            return torch.log_softmax(self.hf(torch.tensor([tokens])).logits[0], -1)

    def total(self, prompt: str, answer: str) -> float:
        """Return Σ log π over the tokens of an answer."""
        before, after = self.ids(prompt), self.ids(answer)
        table = self.table(before + after)[len(before) - 1 : -1]
        return float(table.gather(1, torch.tensor(after)[:, None]).sum())


def last(folder: Path, name: str) -> float:
    return column(folder, name)[-1]


@pytest.fixture(scope="module")
def preferred(workspace: Path) -> Path:
    """Run DPO without interruption."""
    folder = workspace / "run-dpo"
    run("train_dpo", flags_of("dpo", workspace, folder, **{"ckpt.save_steps": 4}))
    return folder


def test_dpo_prefers_the_chosen_answers(workspace: Path, preferred: Path) -> None:
    assert column(preferred, "train/loss")[0] == pytest.approx(
        math.log(2), abs=1e-6
    )  # policy and reference are equal
    assert column(preferred, "train/chosen_reward")[0] == pytest.approx(0, abs=1e-5)
    policy, reference = Plain(preferred / "model"), Plain(workspace / "model")
    losses, right = [], 0
    for row in rows_of("dpo", EVAL_ROWS, seed=2):
        prompt = TEMPLATE.format(row["prompt"])
        ours, theirs = (
            [m.total(prompt, row[k]) for k in ("chosen", "rejected")] for m in (policy, reference)
        )
        lengths = len(row["chosen"]), len(row["rejected"])
        losses.append(
            pair_loss("dpo", (ours[0], ours[1]), (theirs[0], theirs[1]), lengths, 0.1, 0.0, 0.0)
        )
        right += ours[0] - theirs[0] > ours[1] - theirs[1]
    assert last(preferred, "eval/eval_loss") == pytest.approx(sum(losses) / EVAL_ROWS, abs=2e-6)
    assert last(preferred, "eval/acc_mean") == pytest.approx(right / EVAL_ROWS)
    assert right / EVAL_ROWS > 0.9


@pytest.mark.verify
def test_resumed_dpo_run_logs_the_same_metrics_as_an_uninterrupted_run(
    workspace: Path, preferred: Path
) -> None:
    """The metrics also match if the log-probabilities of the reference are precomputed."""
    folder = workspace / "killed-dpo"
    flags = flags_of("dpo", workspace, folder, **{"ckpt.save_steps": 4, "ref.precompute": True})
    kill_when(launch("train_dpo", flags), lambda: steps_logged(folder) >= 6)
    done = run("train_dpo", {**flags, "ckpt.load_enable": True, "run.dir": None})
    assert "/reference-" in done.printed + done.errors
    ours, theirs = numbers(folder), numbers(preferred)
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        if (
            row["step"] == 1
        ):  # at step 1, policy and reference are equal, and rounding decides the accuracy
            row |= {name: expected[name] for name in ("train/acc", "train/acc_mean")}
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_kto_learns_from_labels(workspace: Path) -> None:
    folder = workspace / "run-kto"
    run("train_kto", flags_of("kto", workspace, folder))
    assert column(folder, "train/kto_loss")[0] == pytest.approx(0.5, abs=1e-6)
    policy, reference = Plain(folder / "model"), Plain(workspace / "model")
    rows = rows_of("kto", EVAL_ROWS, seed=2)
    apart = [
        policy.total(TEMPLATE.format(row["input"]), other["output"])
        - reference.total(TEMPLATE.format(row["input"]), other["output"])
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]
    losses = []
    for row in rows:
        prompt = TEMPLATE.format(row["input"])
        ratio = policy.total(prompt, row["output"]) - reference.total(prompt, row["output"])
        losses.append(answer_loss(ratio, row["label"], sum(apart) / EVAL_ROWS, 0.3, (1.0, 1.0)))
    assert last(folder, "eval/eval_loss") == pytest.approx(sum(losses) / EVAL_ROWS, abs=2e-6)
    assert last(folder, "eval/chosen_reward") > last(folder, "eval/reject_reward")


@pytest.mark.verify
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("kto", {}),
        ("prm", {"ds.packing_samples": True, "train.enable_ema": True, "train.ema_beta": 0.7}),
        ("kd", {"ds.lora.rank": 4, "ds.lora.dropout": 0.1}),
        (
            "rm",
            {"ds.zero_stage": 3, "train.enable_ema": True, "train.ema_beta": 0.7, "eval.steps": 3},
        ),
    ],
)
def test_resumed_run_of_each_offline_task_matches_an_uninterrupted_run(
    workspace: Path, task: str, changes: dict[str, Any]
) -> None:
    """The resumed run logs the same metrics and exports the same bytes."""
    whole, folder = workspace / f"whole-{task}", workspace / f"killed-{task}"
    run(f"train_{task}", flags_of(task, workspace, whole, **{"ckpt.save_steps": 4, **changes}))
    flags = flags_of(task, workspace, folder, **{"ckpt.save_steps": 4, **changes})
    kill_when(launch(f"train_{task}", flags), lambda: steps_logged(folder) >= 6)
    done = run(f"train_{task}", {**flags, "ckpt.load_enable": True, "run.dir": None})
    assert "gemm_4bit" not in done.printed + done.errors  # part of a bitsandbytes kernel warning
    assert numbers(folder) == numbers(whole)
    for file in whole.glob("model/*.safetensors"):
        assert (folder / "model" / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def step_judge(workspace: Path) -> Path:
    """Train a process reward model."""
    folder = workspace / "run-prm"
    run(
        "train_prm",
        flags_of("prm", workspace, folder, **{"ds.packing_samples": True, "train.max_epochs": 8}),
    )
    return folder


def test_process_reward_model_distinguishes_correct_from_wrong_steps(step_judge: Path) -> None:
    folder = step_judge
    judge = Plain(folder / "model")
    losses, right = [], []
    for row in rows_of("prm", EVAL_ROWS, seed=2):
        tokens = judge.ids(row["input"])
        table = judge.table(tokens)[
            [t for t, token in enumerate(tokens) if token == judge.ids(STEP)[0]]
        ]
        both = torch.log_softmax(table[:, [judge.ids(RIGHT)[0], judge.ids(WRONG)[0]]], -1)
        for scores, label in zip(both, row["label"], strict=True):
            losses.append(-float(scores[int(label == WRONG)]))
            right.append(float(scores.argmax()) == float(label == WRONG))
    assert last(folder, "eval/eval prm_loss") == pytest.approx(sum(losses) / len(losses), abs=2e-6)
    assert last(folder, "eval/eval acc") == pytest.approx(sum(right) / len(right))
    assert last(folder, "eval/eval acc") > 0.9


@pytest.mark.verify
def test_process_reward_model_scores_the_steps_of_an_episode(
    workspace: Path, step_judge: Path
) -> None:
    """A sample's reward is the mean of P(correct) over its steps, each of which ends with a z.

    The expected values come from plain Transformers.
    """
    folder = workspace / "run-process"
    write_rows(workspace / "prompts.jsonl", [{"input": word} for word in words(8, seed=4)])
    flags = {
        **small_grpo(workspace, folder, prompts=4, samples=2),
        "algo.advantage.estimator": "reinforce",
        "reward.process_model": step_judge / "model",
        "reward.step_separator": "z",
    }
    run("train_ppo_ray", flags)
    judge = Plain(step_judge / "model")
    placeholder, right, wrong = (judge.ids(text)[0] for text in (STEP, RIGHT, WRONG))
    seen = [
        sample for sample in samples(folder) if re.fullmatch(r"[^<\s]+(<eos>)?", sample["response"])
    ]
    assert len(samples(folder)) == 16 and len(seen) > 4
    for sample in seen:
        text, scores = judge.ids(sample["prompt"]), list[float]()
        for step in re.findall("[^z?]*[z?]|[^z?]+$", sample["response"].replace(EOS, "")):
            text += judge.ids(step) + [placeholder] * (not step.endswith(STEP))
            table = judge.table(text)[-1][[right, wrong]]
            scores.append(float(table.softmax(-1)[0]))
        assert sample["reward"] == pytest.approx(sum(scores) / len(scores), abs=1e-4), sample


def test_student_gets_closer_to_its_teacher(workspace: Path) -> None:
    folder = workspace / "run-kd"
    run("train_kd", flags_of("kd", workspace, folder, **{"kd.teacher_offload": True}))
    student, teacher = Plain(folder / "model"), Plain(workspace / "teacher")

    def apart(model: Plain) -> float:
        """Return the mean KL(teacher ‖ model) over the tokens of held-out answers, in nats."""
        found = []
        for row in rows_of("kd", EVAL_ROWS, seed=2):
            tokens = model.ids(TEMPLATE.format(row["input"]) + row["output"])
            start = len(model.ids(TEMPLATE.format(row["input"]))) - 1
            ours, theirs = model.table(tokens)[start:-1], teacher.table(tokens)[start:-1]
            found += ((theirs.exp() * (theirs - ours)).sum(-1)).tolist()
        return sum(found) / len(found)

    assert apart(student) < 0.5 * apart(Plain(workspace / "model"))
    losses = column(folder, "train/distil_loss")
    assert losses[-1] < losses[0]


def test_served_teacher_trains_the_same_student_as_a_local_teacher(
    workspace: Path,
) -> None:
    teacher, tokenizer = Plain(workspace / "teacher"), character_tokenizer()
    flags = {"kd.top_k": 3, "train.max_epochs": 1}
    run("train_kd", flags_of("kd", workspace, workspace / "beside", **flags))
    with openai_server() as server:
        server.texts = lambda token: str(tokenizer.decode([token]))
        server.table = lambda tokens: teacher.table(tokens).tolist()
        run(
            "train_kd",
            flags_of(
                "kd", workspace, workspace / "served", **flags, **{"kd.teacher_model": server.url}
            ),
        )
        assert {body["prompt_logprobs"] for _, body in server.asked if body} == {3}
        server.models = [{"id": "unknown"}]
        done = run(
            "train_kd",
            flags_of(
                "kd", workspace, workspace / "refused", **flags, **{"kd.teacher_model": server.url}
            ),
            status=2,
        )
    assert re.search(
        r"--kd\.teacher_model http.* cannot be used as a teacher. It must be a vLLM server",
        done.errors,
    ), done.errors
    for beside, served in zip(
        numbers(workspace / "beside"), numbers(workspace / "served"), strict=True
    ):
        assert served == pytest.approx(beside, rel=1e-4, abs=1e-6)


# ---- wrong input


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "dpo",
            {"data.chosen_key": "better"},
            r"no column 'better', which --data\.chosen_key names",
        ),
        (
            "dpo",
            {"model.loss_type": "simpo", "ref.precompute": True},
            r"--ref\.precompute.*no effect",
        ),
        ("kto", {"data.label_key": "good"}, r"no column 'good', which --data\.label_key names"),
        (
            "prm",
            {"prm.placeholder_token": "ab"},
            r"--prm\.placeholder_token 'ab' is encoded as 2 tokens",
        ),
        (
            "prm",
            {"prm.reward_tokens": ["+", "*"]},
            r"row 1, column 'label': has the label '-', not one of",
        ),
        ("kd", {"kd.teacher_model": "nowhere"}, r"model nowhere is not a local folder"),
    ],
)
def test_user_error_prints_a_single_message(
    workspace: Path,
    task: str,
    changes: dict[str, Any],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = flags_of(task, workspace, workspace / "mistaken", **changes, dry_run=True)
    with (
        pytest.raises(SystemExit) if "ref.precompute" not in changes else nullcontext()
    ):  # with --ref.precompute, the command only prints a notice
        import_module(f"openrlhf.cli.train_{task}").main(as_arguments(flags))
    errors = capfd.readouterr().err
    assert re.search(message, errors), errors
    assert "Traceback" not in errors


def test_teacher_with_a_different_vocabulary_is_rejected(workspace: Path) -> None:
    other = workspace / "other-teacher"
    save_tiny_model(other, seed=3)
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokens["model"]["vocab"] = {t: i for i, t in enumerate(sorted(tokens["model"]["vocab"]))}
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    flags = flags_of("kd", workspace, workspace / "mistaken", **{"kd.teacher_model": other})
    done = run("train_kd", flags, status=2)
    assert re.search(r"--kd\.teacher_model .*other-teacher.*vocabulary", done.errors), done.errors
