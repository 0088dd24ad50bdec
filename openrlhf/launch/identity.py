"""The identity of a run, compared when a checkpoint is continued and when recorded episodes are replayed.

An identity maps flags, or the things that flags name, to values that survive JSON. Long values are replaced by a hash.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from openrlhf.config.flags import toml_beside, value_at
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.prompts import PromptDataset
from openrlhf.files import fingerprint
from openrlhf.trainers.tasks import Config, Micro, OfflineTask, Row, Rows
from openrlhf.trajectory import Prompt

COMPARED_ROWS = 64  # of a dataset, evenly spread
FLAGS: dict[str, list[str]] = toml_beside(__file__)

Identity = dict[str, Any]


def offline_identity(task: OfflineTask[Config, Row, Micro], rows: Rows, *, model: str | None = None) -> Identity:
    """The identity of an offline run; with another `model`, of what that model would say of the rows."""
    config = task.config

    def columns(row: int) -> list[Any]:
        return [column.tolist() for column in vars(task.collate([rows[row]])).values() if isinstance(column, Tensor)]

    flags = ("train.batch_size", "train.seed", *FLAGS["adapter"], *task.objective)
    path, trusted = model or config.model.model_name_or_path, config.model.trust_remote_code
    return {
        "task": task.name,
        **_values(config, flags),
        "rows of --data.dataset, tokenized": of_rows(len(rows), columns),
        "--model.model_name_or_path": of_model(path, trust_remote_code=trusted),
    }


def rl_identity(config: PPOConfig, prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> Identity:
    """The identity of an RL run."""
    model = of_model(config.actor.model_name_or_path, trust_remote_code=config.model.trust_remote_code)
    of_prompts = _of_prompts(config, FLAGS["run"] + FLAGS["adapter"], prompts, tokenizer)
    return of_prompts | {"--actor.model_name_or_path": model}


def episode_identity(config: PPOConfig, prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> Identity:
    """The identity of an RL run's episodes: everything that decides its prompts and how their samples are drawn."""
    return _of_prompts(config, FLAGS["episodes"], prompts, tokenizer)


def inference_identity(config: BatchInferenceConfig, prompts: Sequence[Prompt]) -> Identity:
    """The identity of answers to prompts, or of the rewards of answers."""
    trusted = config.model.trust_remote_code
    models = [str(config.model.model_name_or_path)] if config.samples_answers else config.reward.models
    return {
        **_values(config, FLAGS["inference"]),
        "models": [of_model(path, trust_remote_code=trusted) for path in models],
        "rows of --data.dataset, rendered": of_rows(len(prompts), lambda row: [prompts[row].text, prompts[row].label]),
    }


def _of_prompts(
    config: PPOConfig, flags: Sequence[str], prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> Identity:
    def contents(number: int) -> list[Any]:
        return [prompts[number].tokens, prompts[number].label]

    return {
        **_values(config, ("rollout.batch_size", "train.seed", *flags)),
        "prompts of --data.prompt_dataset, with --data.input_template and labels": of_rows(len(prompts), contents),
        "vocabulary of --actor.model_name_or_path": f"{len(tokenizer)} tokens, {_hash(tokenizer.get_vocab())}",
    }


def of_rows(count: int, contents: Callable[[int], Any]) -> str:
    """The number of rows, and a hash of the contents of some rows."""
    numbers = {number * (count - 1) // (COMPARED_ROWS - 1) for number in range(COMPARED_ROWS)}
    return f"{count}, {_hash([contents(number) for number in sorted(numbers)])}"


def of_model(path: str, *, trust_remote_code: bool = False) -> str:
    """The architecture of a model and a hash of its weights; for a model on the hub, its name instead of the hash."""
    stored = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict()
    architecture = {
        name: value for name, value in stored.items() if name not in ("transformers_version", "_name_or_path")
    }
    folder = Path(path).expanduser()
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
    weights = _hash([fingerprint(file) for file in files]) if folder.is_dir() else path
    return f"{stored.get('model_type')} {_hash(architecture)}, weights {weights}"


def _values(config: Any, paths: Sequence[str]) -> Identity:
    return json.loads(json.dumps({f"--{path}": value_at(config, path) for path in paths}))


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
