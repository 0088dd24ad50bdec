"""Tests for details of the offline tasks, with models that return fixed values."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES
from openrlhf.config import choices
from openrlhf.config.options import parse_config
from openrlhf.config.supervised import DPOConfig, KDConfig, KTOConfig, PRMConfig
from openrlhf.core.batches import Answers, TokenRows
from openrlhf.data.errors import DataError
from openrlhf.data.feedback import LabelledRow
from openrlhf.trainers.distill import TEACHER, DistillationTask
from openrlhf.trainers.kto import KTOTask
from openrlhf.trainers.preference import PreferenceTask
from openrlhf.trainers.process_reward import ProcessRewardTask
from tests.tiny import character_tokenizer, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class Teacher:
    """A teacher that counts its offloads to CPU memory."""

    def __init__(self) -> None:
        self.rested = 0

    def __call__(self, *_: Any) -> Any:
        return SimpleNamespace(values=torch.zeros(1))

    def rest(self) -> None:
        self.rested += 1


def test_offloaded_teacher_leaves_the_device_before_the_student_runs(model: str) -> None:
    line = (
        f"--model.model_name_or_path {model} --kd.teacher_model {model} --data.dataset d "
        "--kd.teacher_offload"
    )
    task = DistillationTask(parse_config(KDConfig, line.split(), command="kd"))
    teacher = Teacher()
    task.frozen = {TEACHER: teacher}  # pyright: ignore[reportAttributeAccessIssue]
    task.ask_model(Answers.from_lists([[1, 2]], [[False, True]]), torch.tensor([True, False]))
    assert teacher.rested == 1


def test_remote_teacher_returns_logprobs_of_the_token_after_each_position(model: str) -> None:
    """Tokens outside the student's vocabulary are dropped; missing tokens have probability 0."""
    line = (
        f"--model.model_name_or_path {model} --kd.teacher_model http://localhost:1/v1 "
        "--kd.top_k 2 --data.dataset d"
    )
    task = DistillationTask(parse_config(KDConfig, line.split(), command="kd"))
    returned = [[[(-0.1, 7), (-2.0, 10_000)], [(-0.3, 8), (-1.5, 9)]], [[(-0.2, 5)]]]
    task.server.likeliest = lambda rows: returned  # pyright: ignore[reportAttributeAccessIssue]
    rows = TokenRows.from_lists([[1, 2, 3], [4, 5]], [[False, True, True], [False, True]])
    logits, tokens = task.ask_server(rows, torch.tensor([True, True, False, True, False]))
    assert tokens is not None
    assert tokens.tolist() == [[7, 0], [8, 9], [5, 0]]
    expected = torch.tensor([[-0.1, -math.inf], [-0.3, -1.5], [-0.2, -math.inf]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_datasets_with_different_kinds_of_step_labels_are_rejected(model: str) -> None:
    line = (
        f"--model.model_name_or_path {model} --data.dataset d --prm.placeholder_token ? "
        "--prm.reward_tokens + -"
    )
    hard, soft = ([{"input": "a?b?", "label": labels}] for labels in (["+", "-"], [0.9, 0.1]))
    for first, second in ((hard, soft), (soft, hard)):
        task = ProcessRewardTask(parse_config(PRMConfig, line.split(), command="prm"))
        rows = task.rows(Dataset.from_list(first), character_tokenizer())
        assert len(rows) == len(task.rows(Dataset.from_list(first), character_tokenizer())) == 1
        with pytest.raises(DataError, match=r"--data\.dataset and --eval\.dataset"):
            task.rows(Dataset.from_list(second), character_tokenizer())


@pytest.mark.parametrize("loss", sorted(PREFERENCE_LOSSES))
def test_logged_pair_rewards_are_the_values_that_the_loss_compares(loss: str) -> None:
    """The chosen answer is longer but has a higher probability per token."""
    line = (
        f"--model.model_name_or_path m --data.dataset d --model.loss_type {loss} --model.beta 0.5"
    )
    task = PreferenceTask(parse_config(DPOConfig, line.split(), command="dpo"))
    logprobs = torch.tensor([0, -1, -1, -1, 0, -2.0])

    def policy(*_: Any) -> Any:
        return SimpleNamespace(logprobs=logprobs, aux_loss=None)

    micro = Answers.from_lists(
        [[1, 2, 3, 4], [1, 2]], [[False, True, True, True], [False, True]], reference=torch.zeros(2)
    )
    _, metrics = task.loss(policy, micro, {"pairs": 1.0})
    compares_means = not choices.PREFERENCE_LOSSES[loss].needs_reference
    assert metrics["train/chosen_reward"].value == (-0.5 if compares_means else -1.5)
    assert metrics["train/reject_reward"].value == -1.0
    assert metrics["train/acc"].value == float(compares_means)


def test_logged_loss_mean_is_the_minimized_loss() -> None:
    """With --model.nll_loss_coef, the minimized loss is larger than the loss of the pair alone."""
    line = "--model.model_name_or_path m --data.dataset d --model.nll_loss_coef 2"
    task = PreferenceTask(parse_config(DPOConfig, line.split(), command="dpo"))

    def policy(*_: Any) -> Any:
        return SimpleNamespace(logprobs=torch.tensor([0, -3.0, 0, -3.0]), aux_loss=None)

    loss, metrics = task.loss(
        policy,
        Answers.from_lists([[1, 2], [1, 3]], [[False, True]] * 2, reference=torch.zeros(2)),
        {"pairs": 1.0},
    )
    assert metrics["train/loss"].value == pytest.approx(math.log(2))
    assert (
        metrics["train/loss_mean"].value
        == pytest.approx(float(loss))
        == pytest.approx(math.log(2) + 2 * 3)
    )


def kto_task(flags: str = "") -> KTOTask:
    line = f"--model.model_name_or_path m --data.dataset d --data.output_key output {flags}"
    return KTOTask(parse_config(KTOConfig, line.split(), command="kto"))


def test_kto_rejects_a_dataset_of_one_row() -> None:
    """With a single row, the KL estimate would equal the row's own log-ratio."""
    rows = [{"input": "a", "output": "b", "label": True}]
    with pytest.raises(DataError, match="at least 2"):
        kto_task().rows(Dataset.from_list(rows), character_tokenizer())
    assert len(kto_task().rows(Dataset.from_list(rows * 2), character_tokenizer())) == 2


@pytest.mark.parametrize(
    ("max_len", "mixed"), [(8, [4, 5, 8, 9, 2]), (5, [4, 5, 8, 9, 2]), (4, [4, 5, 8, 2])]
)
def test_truncated_mismatched_kto_text_ends_with_the_end_of_text_token(
    max_len: int, mixed: list[int]
) -> None:
    row = LabelledRow(
        tokens=[4, 5, 6, 2],
        loss_mask=[False, False, True, True],
        desirable=True,
        other=[8, 9, 2],
        other_mask=[True, False, True],
    )
    batch = kto_task(f"--data.max_len {max_len}").collate([row])
    assert batch.tokens.tolist() == [*row.tokens, *mixed]
    assert batch.loss_mask[4:].tolist() == [False, False, True, False, True][: len(mixed)]
