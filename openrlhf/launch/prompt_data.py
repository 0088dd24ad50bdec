"""Data that a run reads before it loads models: the tokenizer, prompts and pretraining text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from openrlhf.checks import Finding, collect, report
from openrlhf.config.commands import ModelCommand
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data import first_look
from openrlhf.data.clock import set_clock
from openrlhf.data.errors import DataError, list_columns
from openrlhf.data.first_start import FirstStart
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import ALL_ROWS, Table, load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sft import SFTDataset
from openrlhf.data.tokenizer import Ends, get_tokenizer, require_vocabulary
from openrlhf.data.trained_format import kept_format, with_trained_format
from openrlhf.launch import settings
from openrlhf.models.loading import check_causal_lm, check_positions, step_tokens
from openrlhf.models.scalar import check_is_scalar, check_scalar_weights
from openrlhf.rewards.labels import check_labels
from openrlhf.trainers.pretraining_mix import PretrainingMix

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """The tokenizer, prompts and pretraining text of a run."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    eval: PromptDataset | None
    pretraining: PretrainingMix | None


def load_prompts(config: PPOConfig, first_start: FirstStart) -> PromptData:
    """Return the tokenizer, the prompts and the pretraining text of an RL run.

    Chat templates that render the current date use the date of `first_start`. Raises DataError or
    ModelError.
    """
    data = config.data
    flag = "--actor.model_name_or_path"
    path = config.actor.model_name_or_path
    policy = f"{flag} {path}"
    tokenizer = policy_tokenizer(config, path, flag=flag)
    set_clock(tokenizer, first_start.moment)
    models = collect(
        partial(check_reward_models, config, tokenizer, policy=policy),
        partial(check_critic, config),
        partial(check_teacher, config, tokenizer, policy=policy),
    )
    report(*models)
    trained_model = None
    if first_start.trained_format:
        trained_model = policy
    rows_of = partial(PromptDataset, image_key=data.image_key)
    prompts = partial(read_prompts, config, rows_of, tokenizer, model=trained_model)
    read: dict[str, Any] = {"eval": None, "pretraining": None}

    def read_training_prompts() -> list[Finding]:
        read["train"] = prompts(
            data.prompt_dataset,
            split=data.prompt_split,
            probs=data.prompt_probs,
            max_samples=data.max_samples,
        )
        return prompt_findings(config, read["train"], tokenizer, model=policy)

    def read_evaluation_prompts() -> list[Finding]:
        if not config.eval.dataset:
            return []
        read["eval"] = prompts(config.eval.dataset, split=config.eval.split, max_samples=ALL_ROWS)
        return check_prompts(config, read["eval"])

    def read_pretraining_text() -> None:
        if config.algo.ptx.dataset:
            read["pretraining"] = load_pretraining_text(config, tokenizer)

    found = collect(read_training_prompts, read_evaluation_prompts, read_pretraining_text)
    report(*found)
    return PromptData(tokenizer=tokenizer, **read)


def policy_tokenizer(config: ModelCommand, path: str, *, flag: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model that generates responses.

    Raises DataError, or ModelError if the model is unsuitable.
    """
    tokenizer = get_tokenizer(
        path, padding_side="left", trust_remote_code=config.model.trust_remote_code, flag=flag
    )
    check_language_model(config, path)
    return tokenizer


def scorer_tokenizer(config: settings.SamplingCommand) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the first reward model, for a command without a policy.

    Raises DataError or ModelError.
    """
    path = config.reward.models[0]
    trusted = config.model.trust_remote_code
    tokenizer = get_tokenizer(path, trust_remote_code=trusted, flag="--reward.model_name_or_path")
    check_reward_models(config, tokenizer, policy=f"the first, {path}")
    return tokenizer


def check_language_model(config: ModelCommand, path: str) -> None:
    """Raise ModelError unless the model is a causal LM with at least --data.max_len positions."""
    spec = settings.load_spec(config, path)
    if isinstance(config, PPOConfig) and path == config.actor.model_name_or_path:
        spec = spec.trained(config.actor, config.ds.lora, config.train.seed)
    check_causal_lm(spec)
    check_positions(spec)


def check_critic(config: PPOConfig) -> None:
    """Raise ModelError if a critic cannot be initialized from --critic.model_name_or_path."""
    path = config.critic.model_name_or_path
    if not path:
        return
    spec = settings.load_spec(config, path)
    is_policy = path == config.actor.model_name_or_path
    check_scalar_weights(spec, head_prefix=config.ds.value_head_prefix, reinit_head=is_policy)


def check_teacher(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, *, policy: str) -> None:
    """Raise an error unless the teacher is a causal LM with the policy's vocabulary."""
    path = config.local_teacher
    if not path:
        return
    check_language_model(config, path)
    require_vocabulary(
        tokenizer,
        path,
        flag="--algo.distill.teacher",
        owner=policy,
        trust_remote_code=config.model.trust_remote_code,
    )


def read_prompts(
    config: settings.SamplingCommand,
    rows_of: Callable[..., T],
    tokenizer: PreTrainedTokenizerBase,
    spec: str,
    *,
    model: str | None,
    **part: Any,
) -> T:
    """Load a dataset and convert its rows to prompts with `prompts_of`.

    `part` holds the arguments `split`, `max_samples` and `probs` of `load_datasets`.
    """
    rows = load_datasets(spec, seed=config.train.seed, **part)
    return prompts_of(config, rows_of, tokenizer, rows, model=model)


def prompts_of(
    config: settings.SamplingCommand,
    rows_of: Callable[..., T],
    tokenizer: PreTrainedTokenizerBase,
    rows: Table,
    *,
    model: str | None,
    generates: bool = True,
) -> T:
    """Convert rows to prompts with `rows_of` and the --data.* columns and templates.

    `model` consists of the flag that names the tokenizer's model, and the flag's value. The model's
    training format becomes the default; if `model` is None, there is no default format. `generates`
    is true if the model generates responses to these prompts. Raises DataError.
    """
    answers = "output_key"
    if config.reward.needs_labels:
        answers = "label_key"
    data = recognise(rows, config, "text", answers=answers)
    if config.reward.needs_labels and not data.label_key:
        raise DataError(
            f"--reward.verifier {config.reward.verifier} needs labels, but no label column was "
            f"detected. Set --data.label_key to one of {list_columns(rows.column_names)}."
        )
    if model:
        column = data.input_key
        if config.train.agent_func_path:  # an agent renders its own prompts
            column = None
        data = with_trained_format(
            config, data, tokenizer, rows, column=column, model=model, generates=generates
        )
    return rows_of(rows, tokenizer, data)


def prompt_findings(
    config: settings.SamplingCommand,
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
) -> list[Finding]:
    """Return all findings about prompts, and record their text format in the tokenizer.

    `model` consists of the flag that names the tokenizer's model, and the flag's value.
    """
    return collect(
        partial(look_at_prompts, config, prompts, tokenizer, model=model),
        partial(check_prompts, config, prompts),
    )


def look_at_prompts(
    config: settings.SamplingCommand,
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
) -> list[Finding]:
    """Return findings about the first prompts, and record their text format in the tokenizer.

    Raises DataError if tokenization loses text.
    """
    count = min(first_look.FIRST_ROWS, len(prompts))
    texts = [prompts[number].text for number in range(count)]
    used = first_look.TextFormat.of(prompts.data, tokenizer)
    trained = first_look.recorded(tokenizer)
    found = first_look.round_trip(tokenizer, texts, prompts=True)
    found += first_look.joined_border(used, tokenizer)
    used = kept_format(used, tokenizer, texts)
    found += first_look.compare_formats(model, trained, used, texts)
    applied = prompts.data.apply_chat_template
    has_agent = bool(config.train.agent_func_path)
    if not has_agent:  # an agent renders its own prompts
        found += first_look.unused_chat_template(model, tokenizer, texts, applied=applied)
    if applied or has_agent:
        found += first_look.dated_template(tokenizer)
    found += check_reward_formats(config, used, texts)
    if trained and trained.ending:
        used = replace(used, ending=trained.ending)
        responses = f"When {model} was trained, responses"
        found += first_look.check_ending(trained.ending, tokenizer, responses)
    if used.chat_template:
        stops = ends_of_generation(config, tokenizer)
        found += first_look.chat_end(tokenizer, stops)
    first_look.record(tokenizer, used)
    return found


def check_prompts(config: settings.SamplingCommand, prompts: PromptDataset) -> list[Finding]:
    """Return findings about the lengths and labels of all prompts.

    Returns no findings with --train.agent_func_path, because agents write their own prompts.
    """
    if config.train.agent_func_path:
        return []
    found = first_look.check_answer_room(
        prompts.lengths(),
        max_len=config.data.max_len,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    verifier = config.reward.verifier
    column = prompts.data.label_key  # the column is set by the user or detected
    if verifier and column:
        found += check_labels(verifier, prompts.labels(), column=column, origin=prompts.origin)
    return found


def check_reward_formats(
    config: settings.SamplingCommand, used: first_look.TextFormat, texts: Sequence[str]
) -> list[Finding]:
    """Return a notice about each reward model that was trained on a different prompt format.

    `texts` are prompts of this run in the format `used`.
    """
    found: list[Finding] = []
    applied = bool(used.chat_template)
    for path in config.reward.models:
        model = f"--reward.model_name_or_path {path}"
        tokenizer = get_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        trained = first_look.recorded(tokenizer)
        found += first_look.compare_formats(model, trained, used, texts)
        found += first_look.unused_chat_template(model, tokenizer, texts, applied=applied)
    return found


def ends_of_generation(
    config: settings.SamplingCommand, tokenizer: PreTrainedTokenizerBase
) -> set[str]:
    """Return the strings at which the engine stops generating.

    The stop strings come from the tokenizer, the model's generation_config.json and the flags.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(config.rollout.stop_token_ids))
    return {*Ends.of(tokenizer).texts, *config.rollout.stop, *map(str, tokens)}


def load_pretraining_text(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainingMix:
    """Return the rows of --algo.ptx.dataset, in which every token is a target.

    Raises DataError.
    """
    ptx = config.algo.ptx
    seed = config.train.seed
    rows = load_datasets(
        ptx.dataset or "",
        split=ptx.split,
        probs=ptx.probs,
        max_samples=config.data.max_samples,
        seed=seed,
    )
    columns = SFTDataConfig(max_len=config.data.max_len, input_key=config.data.input_key)
    text = SFTDataset(rows, tokenizer, columns, pretrain=True)
    return PretrainingMix(text, batch_size=config.train.batch_size, seed=seed)


def check_reward_models(
    config: settings.SamplingCommand, tokenizer: PreTrainedTokenizerBase, *, policy: str
) -> None:
    """Raise an error if a reward model cannot score the policy's samples.

    Raises ModelError if a model is not a reward model or does not support a flag, and DataError if
    its vocabulary differs from the policy's.
    """
    require_same = partial(
        require_vocabulary,
        tokenizer,
        owner=policy,
        trust_remote_code=config.model.trust_remote_code,
    )
    for path in config.reward.scalars:
        check_is_scalar(
            settings.load_spec(config, path),
            head_prefix=config.ds.value_head_prefix,
            normalize=config.reward.normalize_enable,
        )
        require_same(path, flag="--reward.model_name_or_path")
    path = config.reward.process_model
    if path:
        spec = settings.load_spec(config, path)
        step_tokens(spec)
        check_causal_lm(spec)
        require_same(path, flag="--reward.process_model")
