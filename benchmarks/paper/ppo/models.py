"""Writes one reward model in two formats: for this project and for DeepSpeed-Chat.

    python -m benchmarks.paper.ppo.models meta-llama/Llama-2-7b-hf FOLDER

The head is random, because the speed of PPO does not depend on what the rewards mean. FOLDER/reward
contains a Transformers sequence classifier; FOLDER/deepspeed_chat has the layout in which
DeepSpeed-Chat's second training step saves a model (config.json and pytorch_model.bin).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def padded_rows(model: str, tokens: int) -> int:
    """Return the number of embedding rows that DeepSpeed-Chat uses for a tokenizer's tokens.

    DeepSpeed-Chat adds a padding token if the model's name contains "llama", and rounds up to a
    multiple of 8 (`dschat/utils/utils.py`, `dschat/utils/model/model_utils.py`).
    """
    if "llama" in model:
        tokens += 1
    return -(-tokens // 8) * 8


def write(model: str, folder: Path) -> None:
    """Write both formats. Needs twice the size of the model on disk."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.bfloat16
    )
    scorer.config.pad_token_id = tokenizer.eos_token_id
    scorer.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")

    scorer.resize_token_embeddings(padded_rows(model, len(tokenizer)))
    weights = {}
    for name, weight in scorer.model.state_dict().items():
        weights[f"rwtransformer.{name}"] = weight
    weights["v_head.weight"] = scorer.score.weight.detach()
    published = folder / "deepspeed_chat"
    published.mkdir(parents=True, exist_ok=True)
    scorer.config.to_json_file(published / "config.json")
    torch.save(weights, published / "pytorch_model.bin")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    write(chosen.model, chosen.folder)
