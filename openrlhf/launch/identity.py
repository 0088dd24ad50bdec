"""The identity of a run: the values that must match to resume a checkpoint or replay episodes.

An identity maps flags, models and datasets to JSON values. Long values are replaced by their
hashes.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from openrlhf.config.flags import value_at
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.loading import Table
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.rows import contents_of, without_origin
from openrlhf.files import fingerprint
from openrlhf.trainers.tasks import Config, Micro, OfflineTask, Row, Rows

# Flags that must match, in addition to the data, the models, --rollout.batch_size and --train.seed.
FLAGS: dict[str, list[str]] = {
    # flags that must match to resume an RL run
    "run": [
        "algo.advantage.estimator",
        "actor.policy_loss_type",
        "algo.kl.estimator",
        "algo.kl.use_loss",
        "reward.verifier",
        "train.async_enable",
    ],
    # flags that must match to resume any run that trains a LoRA adapter
    "adapter": [
        "ds.lora.rank",
        "ds.lora.alpha",
        "ds.lora.target_modules",
        "ds.lora.rslora",
        "ds.lora.dora",
    ],
    # flags that must match to reuse stored log-probabilities of the reference model
    "reference": ["ds.param_dtype", "ds.attn_implementation", "ds.load_in_4bit"],
    # flags that must match to replay the episodes of an RL run
    "episodes": [
        "rollout.n_samples_per_prompt",
        "rollout.temperature",
        "rollout.max_new_tokens",
        "data.max_len",
        "algo.dynamic_filtering_enable",
        "algo.dynamic_filtering_range",
    ],
    # flags that must match to resume batch inference
    "inference": [
        "task",
        "post_processor",
        "reward_template",
        "best_of_n",
        "data.max_len",
        "train.seed",
        "rollout.max_new_tokens",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.top_k",
        "rollout.repetition_penalty",
        "rollout.stop",
        "rollout.stop_token_ids",
        "reward.normalize_enable",
        "reward.weights",
    ],
}
# The --data.* flags that select rows.
# A request's hash covers the rows themselves instead of these flags.
ROW_FLAGS = ("dataset", "dataset_split", "dataset_probs", "dataloader_num_workers")

Identity = dict[str, Any]


def offline_identity(task: OfflineTask[Config, Row, Micro], rows: Rows) -> Identity:
    """Return the identity of an offline run."""
    flags = ("train.batch_size", "train.seed", *FLAGS["adapter"], *task.objective)
    model = task.config.model
    identity = {"task": task.name, **texts_identity(task, rows, flags, model.model_name_or_path)}
    for name, path in task.frozen_paths().items():
        if path:
            identity[name] = of_model(path, trust_remote_code=model.trust_remote_code)
    return identity


def texts_identity(
    task: OfflineTask[Any, Any, Any], rows: Rows, flags: Sequence[str], model: str
) -> Identity:
    """Return the identity of a model, its tokenized rows and the values of `flags`."""
    # A plugin's rows may have any class.
    contents = getattr(rows, "contents", partial(_collated, task, rows))
    return {
        **_values(task.config, flags),
        "all rows of --data.dataset, tokenized": of_rows(len(rows), contents()),
        "--model.model_name_or_path": of_model(
            model, trust_remote_code=task.config.model.trust_remote_code
        ),
    }


def _collated(task: OfflineTask[Any, Any, Any], rows: Rows) -> Iterator[bytes]:
    """Yield each row's contents: the tensors of a batch that contains only this row."""
    for number in range(len(rows)):
        columns = vars(task.collate([rows[number]])).values()
        tensors = [column.tolist() for column in columns if isinstance(column, Tensor)]
        yield repr(tensors).encode()


def rl_identity(config: PPOConfig, prompts: PromptDataset) -> Identity:
    """Return the identity of an RL run."""
    identity = episode_identity(config, prompts, FLAGS["run"] + FLAGS["adapter"])
    trusted = config.model.trust_remote_code
    identity["--actor.model_name_or_path"] = of_model(
        config.actor.model_name_or_path, trust_remote_code=trusted
    )
    if config.local_teacher:
        identity["--algo.distill.teacher"] = of_model(
            config.local_teacher, trust_remote_code=trusted
        )
    return identity


def episode_identity(
    config: PPOConfig, prompts: PromptDataset, flags: Sequence[str] = FLAGS["episodes"]
) -> Identity:
    """Return the identity of an RL run's episodes: the prompts and the values of `flags`.

    By default, `flags` are the flags that affect sampling.
    """
    vocabulary = prompts.tokenizer.get_vocab()
    return {
        **_values(config, ("rollout.batch_size", "train.seed", *flags)),
        "all prompts of --data.prompt_dataset, with --data.input_template and labels": of_rows(
            len(prompts), prompts.contents()
        ),
        "vocabulary of --actor.model_name_or_path": (
            f"{len(prompts.tokenizer)} tokens, {_hash(vocabulary)}"
        ),
    }


def inference_identity(config: BatchInferenceConfig, prompts: Sequence[Prompt]) -> Identity:
    """Return the identity of a batch inference run, which answers prompts or scores answers."""
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
    """Return a hash of a batch inference request before its rows are rendered.

    The hash covers the flags, the stored rows and the models.
    """
    data = dict(vars(config.data))
    for name in ROW_FLAGS:
        del data[name]
    stored = without_origin(rows)
    request = {
        **_values(config, [*FLAGS["inference"], "iter", "rollout.batch_size"]),
        "sections": [data, vars(config.csft)],
        "models": _inference_models(config),
        "chat template": tokenizer.chat_template,
        "columns": stored.column_names,
        "rows": of_rows(len(stored), contents_of(stored)),
    }
    return _hash(request)


def _inference_models(config: BatchInferenceConfig) -> list[str]:
    paths = config.reward.models
    if config.samples_answers:
        paths = [str(config.model.model_name_or_path)]
    trusted = config.model.trust_remote_code
    return [of_model(path, trust_remote_code=trusted) for path in paths]


def of_rows(count: int, contents: Iterable[bytes]) -> str:
    """Return the number of rows and a hash of their contents."""
    digest = hashlib.sha256()
    for part in contents:
        digest.update(part)
    return f"{count}, {digest.hexdigest()[:16]}"


def of_model(path: str, *, trust_remote_code: bool) -> str:
    """Return the architecture of a model and a hash of its weights.

    For a model on the Hub, its name is used instead of a hash of its weights.
    """
    architecture = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict()
    for name in ("transformers_version", "_name_or_path"):
        architecture.pop(name, None)
    weights = path
    folder = Path(path)
    if folder.is_dir():
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        weights = _hash([fingerprint(file) for file in files])
    return f"{architecture.get('model_type')} {_hash(architecture)}, weights {weights}"


def _values(config: Any, paths: Sequence[str]) -> Identity:
    """Return the values of flags after a round trip through JSON."""
    return json.loads(json.dumps({f"--{path}": value_at(config, path) for path in paths}))


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
