"""A random language model with three million parameters and a tokenizer trained on a CSV file.

python examples/data/tiny_model.py preferences.csv runs/tiny
"""

import csv
import os
import sys
from pathlib import Path

os.environ.setdefault(
    "DS_ACCELERATOR", "cpu"
)  # this script needs no GPU, so keep DeepSpeed from looking for one

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 4096  # maximum number of tokens
# Qwen2 tokenizers always add this eos token, so any other eos token would be a second eos token.
END = "<|endoftext|>"


def make_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on all cells in the file.

    The tokenizer can encode any text, including characters that do not occur in the file.
    """
    with file.open(newline="", encoding="utf-8") as opened:
        texts = [cell for row in csv.reader(opened) for cell in row]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


def main(file: str, folder: str) -> None:
    """Write the model and its tokenizer to `folder`."""
    tokenizer = make_tokenizer(Path(file))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} FILE.csv FOLDER")
    main(*sys.argv[1:])
