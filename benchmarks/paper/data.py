"""Writes the prompts of a comparison in the format of each framework.

    python -m benchmarks.paper.data gsm8k FOLDER
    python -m benchmarks.paper.data ppo FOLDER --tokenizer meta-llama/Llama-2-7b-hf --prompts 4096
    python -m benchmarks.paper.data dapo FOLDER --source downloaded.parquet

Without --source, the dataset is downloaded from the Hugging Face Hub.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SOURCES: Mapping[str, tuple[str, ...]] = {  # Hub name and configuration
    "gsm8k": ("openai/gsm8k", "main"),
    "ppo": ("Dahoas/rm-static",),
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k",),
}
ASK = "Think step by step, and end with the final answer as a number."
LONGEST_PROMPT = {"gsm8k": 512, "ppo": 256, "dapo": 1024}  # tokens


def gsm8k_rows(problems: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return chat prompts with the number after #### as the answer."""
    rows = []
    for problem in problems:
        question = [{"role": "user", "content": f"{problem['question']}\n{ASK}"}]
        answer = problem["answer"].split("####")[-1].strip().replace(",", "")
        rows.append({"prompt": question, "answer": answer})
    return rows


def dapo_rows(problems: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return each problem of DAPO-Math-17k once. The published file repeats every problem."""
    rows = {}
    for problem in problems:
        [message] = problem["prompt"]
        question = [{"role": "user", "content": message["content"]}]
        rows[message["content"]] = {
            "prompt": question,
            "answer": str(problem["reward_model"]["ground_truth"]),
        }
    return list(rows.values())


def ppo_rows(pairs: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return each prompt once, with the leading space that DeepSpeed-Chat adds."""
    texts = dict.fromkeys(" " + pair["prompt"] for pair in pairs)
    return [{"prompt": text} for text in texts]


def for_verl(row: Row, index: int) -> Row:
    """Return a row with the columns that verl's dataset reads."""
    return {
        "data_source": "paper",
        "prompt": row["prompt"],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": index},
    }


def for_deepspeed_chat(row: Row) -> Row:
    """Return a row of DeepSpeed-Chat's `local/jsonfile`, which adds a space before the prompt.

    RLHF training reads only the prompt, but the file must have all three columns.
    """
    return {"prompt": row["prompt"].removeprefix(" "), "chosen": "", "rejected": ""}


def short_enough(rows: Sequence[Row], tokenizer: Any, longest: int) -> list[Row]:
    """Return the rows whose prompt has at most `longest` tokens."""
    kept = []
    for row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            tokens = tokenizer(prompt)["input_ids"]
        else:
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) <= longest:
            kept.append(row)
    return kept


def write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write(name: str, folder: Path, rows: Sequence[Row]) -> None:
    """Write prompts.jsonl for this project and TRL, and a second file in the peer's format."""
    write_json_lines(folder / "prompts.jsonl", rows)
    if name == "dapo":
        from datasets import Dataset

        converted = [for_verl(row, index) for index, row in enumerate(rows)]
        Dataset.from_list(converted).to_parquet(folder / "prompts.parquet")
    if name == "ppo":
        converted = [for_deepspeed_chat(row) for row in rows]
        write_json_lines(folder / "deepspeed_chat" / "train.json", converted)
        write_json_lines(folder / "deepspeed_chat" / "eval.json", converted[:64])


def read(name: str, source: Path | None) -> list[Row]:
    """Read the dataset from the Hub or a local file, and convert its rows."""
    from datasets import load_dataset

    if source is None:
        published: Any = load_dataset(*SOURCES[name], split="train")
    else:
        kind = "parquet" if source.suffix == ".parquet" else "json"
        published = load_dataset(kind, data_files=str(source), split="train")
    convert = {"gsm8k": gsm8k_rows, "ppo": ppo_rows, "dapo": dapo_rows}[name]
    return convert(published)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the prompts of one comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(SOURCES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="model whose tokens are counted")
    parser.add_argument("--prompts", type=int, help="number of prompts to keep; unset: all")
    parser.add_argument("--source", type=Path, help="a JSON Lines or Parquet file")
    chosen = parser.parse_args(argv)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chosen.tokenizer)
    rows = short_enough(read(chosen.name, chosen.source), tokenizer, LONGEST_PROMPT[chosen.name])
    if chosen.prompts and len(rows) < chosen.prompts:
        parser.error(f"the dataset has {len(rows)} short prompts, fewer than {chosen.prompts}")
    write(chosen.name, chosen.folder, rows[: chosen.prompts])
    print(f"{len(rows[: chosen.prompts])} prompts in {chosen.folder}")


if __name__ == "__main__":
    main()
