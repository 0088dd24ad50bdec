"""SFT, reward model training or DPO in TRL, in float32.

python -m benchmarks.trl_offline ROWS KIND MODEL DATA

Data rows are grouped by length. The script writes a row of measurements after each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # type: ignore[import-not-found]

from benchmarks.workload import BATCH, EPOCHS, LONGEST_ROW, OFFLINE_MICRO_BATCH


class GroupedPairs:
    """A mixin that groups pairs by length, because TRL's trainers do not know a pair's length."""

    train_dataset: Any

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        data = self.train_dataset
        lengths = [
            max(map(len, pair))
            for pair in zip(data["chosen_ids"], data["rejected_ids"], strict=True)
        ]
        return LengthGroupedSampler(BATCH, lengths=lengths)


class GroupedRewardTrainer(GroupedPairs, RewardTrainer):
    """Reward model training on pairs that are grouped by length."""


class GroupedDPOTrainer(GroupedPairs, DPOTrainer):
    """DPO on pairs that are grouped by length."""


KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, AutoModelForCausalLM, {}),
    "rm": (
        GroupedRewardTrainer,
        RewardConfig,
        AutoModelForSequenceClassification,
        {"num_labels": 1},
    ),
    "dpo": (GroupedDPOTrainer, DPOConfig, AutoModelForCausalLM, {}),
}


class Rows(TrainerCallback):
    """A callback that writes a row for every step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"train/step": state.global_step}) + "\n")


def main(rows: str, kind: str, model: str, data: str) -> None:
    torch.set_num_threads(1)
    trainer, settings, model_class, changes = KINDS[kind]
    config = settings(
        output_dir=f"{rows}.out",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=OFFLINE_MICRO_BATCH,
        gradient_accumulation_steps=BATCH // OFFLINE_MICRO_BATCH,
        max_length=LONGEST_ROW,
        num_train_epochs=EPOCHS,
        train_sampling_strategy="group_by_length",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    columns = {"input": "prompt", "output": "completion"}  # columns of pairs need no renaming
    dataset: Any = load_dataset("json", data_files=data, split="train")
    named = dataset.rename_columns(
        {old: new for old, new in columns.items() if old in dataset.column_names}
    )
    trainer(
        model=model_class.from_pretrained(model, dtype=torch.float32, **changes),
        args=config,
        train_dataset=named,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Rows(Path(rows))],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
