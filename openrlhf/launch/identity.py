"""The identity of a run, compared when a checkpoint is continued and when recorded episodes are
replayed.

An identity maps flags, or the things that flags name, to values that survive JSON. Long values are
replaced by a hash.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from openrlhf.config.flags import toml_beside, value_at
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.loading import Table
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.rows import contents_of, without_origin
from openrlhf.files import fingerprint
from openrlhf.trainers.tasks import Config, Micro, OfflineTask, Row, Rows

FLAGS: dict[str, list[str]] = toml_beside(__file__)

Identity = dict[str, Any]


def offline_identity(task: OfflineTask[Config, Row, Micro], rows: Rows) -> Identity:
    """The identity of an offline run."""
    flags = ("train.batch_size", "train.seed", *FLAGS["adapter"], *task.objective)
    trusted = task.config.model.trust_remote_code
    frozen = {
        name: of_model(path, trust_remote_code=trusted)
        for name, path in task.frozen_paths().items()
        if path
    }
    return {
        "task": task.name,
        **texts_identity(task, rows, flags, task.config.model.model_name_or_path),
        **frozen,
    }


def texts_identity(
    task: OfflineTask[Any, Any, Any], rows: Rows, flags: Sequence[str], model: str
) -> Identity:
    """The identity of rows that a model reads, with these flags."""
    collated = (vars(task.collate([rows[row]])).values() for row in range(len(rows)))
    plain = (
        repr([column.tolist() for column in row if isinstance(column, Tensor)]).encode()
        for row in collated
    )
    contents = getattr(rows, "contents", lambda: plain)()  # rows of a plug-in may be of any class
    return {
        **_values(task.config, flags),
        "all rows of --data.dataset, tokenized": of_rows(len(rows), contents),
        "--model.model_name_or_path": of_model(
            model, trust_remote_code=task.config.model.trust_remote_code
        ),
    }


def rl_identity(config: PPOConfig, prompts: PromptDataset) -> Identity:
    """The identity of an RL run."""
    model = of_model(
        config.actor.model_name_or_path, trust_remote_code=config.model.trust_remote_code
    )
    of_prompts = episode_identity(config, prompts, FLAGS["run"] + FLAGS["adapter"])
    teacher = {"--algo.distill.teacher": of_model(path)} if (path := config.local_teacher) else {}
    return of_prompts | {"--actor.model_name_or_path": model} | teacher


def episode_identity(
    config: PPOConfig, prompts: PromptDataset, flags: Sequence[str] = FLAGS["episodes"]
) -> Identity:
    """The identity of an RL run's episodes: its prompts, and by default the flags that decide how
    samples are drawn.
    """
    found, tokenizer = of_rows(len(prompts), prompts.contents()), prompts.tokenizer
    return {
        **_values(config, ("rollout.batch_size", "train.seed", *flags)),
        "all prompts of --data.prompt_dataset, with --data.input_template and labels": found,
        "vocabulary of --actor.model_name_or_path": f"{len(tokenizer)} tokens, {_hash(tokenizer.get_vocab())}",
    }


def inference_identity(config: BatchInferenceConfig, prompts: Sequence[Prompt]) -> Identity:
    """The identity of answers to prompts, or of the rewards of answers."""
    contents = (
        repr((prompt.text, prompt.label)).encode(errors="surrogatepass") for prompt in prompts
    )
    return {
        **_values(config, FLAGS["inference"]),
        "models": _inference_models(config),
        "rows of --data.dataset, rendered": of_rows(len(prompts), contents),
    }


def request_identity(
    config: BatchInferenceConfig, rows: Table, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return a hash of a batch_inference request before its rows are rendered: flags, rows as
    stored, models.
    """
    sections = json.loads(json.dumps([vars(config.data), vars(config.csft)], default=str))
    for name in (
        "dataset",
        "dataset_split",
        "dataset_probs",
        "dataloader_num_workers",
    ):  # the rows themselves count
        sections[0].pop(name)
    stored = without_origin(rows)
    request = {
        **_values(config, [*FLAGS["inference"], "iter", "rollout.batch_size"]),
        "sections": sections,
        "models": _inference_models(config),
        "chat template": tokenizer.chat_template,
        "columns": stored.column_names,
        "rows": of_rows(len(stored), contents_of(stored)),
    }
    return _hash(request)


def _inference_models(config: BatchInferenceConfig) -> list[str]:
    trusted = config.model.trust_remote_code
    models = (
        [str(config.model.model_name_or_path)] if config.samples_answers else config.reward.models
    )
    return [of_model(path, trust_remote_code=trusted) for path in models]


def of_rows(count: int, contents: Iterable[bytes]) -> str:
    """The number of rows, and a hash of their contents."""
    found = hashlib.sha256()
    for part in contents:
        found.update(part)
    return f"{count}, {found.hexdigest()[:16]}"


def of_model(path: str, *, trust_remote_code: bool = False) -> str:
    """The architecture of a model and a hash of its weights; for a model on the hub, its name
    instead of the hash.
    """
    stored = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict()
    architecture = {
        name: stored[name] for name in stored.keys() - {"transformers_version", "_name_or_path"}
    }
    folder = Path(path)
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
    weights = _hash([fingerprint(file) for file in files]) if folder.is_dir() else path
    return f"{stored.get('model_type')} {_hash(architecture)}, weights {weights}"


def _values(config: Any, paths: Sequence[str]) -> Identity:
    return json.loads(json.dumps({f"--{path}": value_at(config, path) for path in paths}))


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
