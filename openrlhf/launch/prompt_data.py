"""The data that an RL run reads before a model is loaded: tokenizer, prompts, pretraining text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import ModelCommand
from openrlhf.config.flags import notice
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data import first_look
from openrlhf.data.clock import set_clock
from openrlhf.data.errors import DataError, list_columns
from openrlhf.data.findings import report
from openrlhf.data.first_start import now
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import ALL_ROWS, Table, load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sft import SFTDataset
from openrlhf.data.tokenizer import end_ids, get_tokenizer, require_vocabulary
from openrlhf.data.trained_format import kept_format, with_trained_format
from openrlhf.launch import settings
from openrlhf.models.loading import check_causal_lm, check_positions, step_tokens
from openrlhf.models.scalar import check_is_scalar, check_scalar_weights
from openrlhf.rewards.labels import check_labels
from openrlhf.trainers.pretraining_mix import PretrainingMix

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """Tokenizer, prompts and pretraining text of a run."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    eval: PromptDataset | None
    pretraining: PretrainingMix | None


def load_prompts(config: PPOConfig, *, started: str = "", follows: bool = True) -> PromptData:
    """Return tokenizer, training prompts, evaluation prompts and pretraining text. Raises DataError
    or ModelError.

    `started`: the moment of the run's first start, whose date a chat template writes. `follows`: by
    default prompts have the format that the policy was trained with.
    """
    data = config.data
    tokenizer = policy_tokenizer(
        config, config.actor.model_name_or_path, flag="--actor.model_name_or_path"
    )
    set_clock(tokenizer, started or now())
    policy = f"--actor.model_name_or_path {config.actor.model_name_or_path}"
    check_reward_models(config, tokenizer, policy=policy)
    if config.critic.model_name_or_path:
        check_critic(config, config.critic.model_name_or_path)
    if config.local_teacher:
        check_language_model(config, config.local_teacher)
        trusts, flag = config.model.trust_remote_code, "--algo.distill.teacher"
        require_vocabulary(
            tokenizer, config.local_teacher, flag=flag, owner=policy, trust_remote_code=trusts
        )
    rows_of = partial(PromptDataset, image_key=data.image_key)
    prompts = partial(read_prompts, config, rows_of, tokenizer, model=policy if follows else None)
    train = prompts(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        max_samples=data.max_samples,
    )
    look_at_prompts(
        config,
        train,
        tokenizer,
        policy=config.actor.model_name_or_path,
        flag="--actor.model_name_or_path",
    )
    check_prompts(config, train)
    held_out = None
    if config.eval.dataset:
        held_out = prompts(config.eval.dataset, split=config.eval.split, max_samples=ALL_ROWS)
        check_prompts(config, held_out)
    return PromptData(
        tokenizer=tokenizer,
        train=train,
        eval=held_out,
        pretraining=load_pretraining_text(config, tokenizer) if config.algo.ptx.dataset else None,
    )


def policy_tokenizer(config: ModelCommand, path: str, *, flag: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that answers prompts. Raises DataError, or ModelError for an
    unsuitable model.
    """
    tokenizer = get_tokenizer(
        path, padding_side="left", trust_remote_code=config.model.trust_remote_code, flag=flag
    )
    check_language_model(config, path)
    return tokenizer


def scorer_tokenizer(config: settings.Sampling) -> PreTrainedTokenizerBase:
    """The tokenizer of the first reward model, of a command without a policy. Raises DataError or
    ModelError.
    """
    path, trusts = config.reward.models[0], config.model.trust_remote_code
    tokenizer = get_tokenizer(path, trust_remote_code=trusts, flag="--reward.model_name_or_path")
    check_reward_models(config, tokenizer, policy=f"the first, {path}")
    return tokenizer


def check_language_model(config: ModelCommand, path: str) -> None:
    """Raise ModelError unless the model is a language model with enough positions for
    --data.max_len.
    """
    spec = settings.load_spec(config, path)
    if isinstance(config, PPOConfig) and path == config.actor.model_name_or_path:
        spec = spec.trained(config.actor, config.ds.lora, config.train.seed)
    check_causal_lm(spec)
    check_positions(spec)


def check_critic(config: PPOConfig, path: str) -> None:
    """Raise ModelError unless the folder has a complete model that a critic can begin with."""
    spec, is_policy = settings.load_spec(config, path), path == config.actor.model_name_or_path
    check_scalar_weights(spec, head_prefix=config.ds.value_head_prefix, reinit_head=is_policy)


def read_prompts(
    config: settings.Sampling,
    rows_of: Callable[..., T],
    tokenizer: PreTrainedTokenizerBase,
    spec: str,
    *,
    model: str | None,
    **part: Any,
) -> T:
    """Load a dataset, and return it as `prompts_of` does. `part`: split, max_samples and probs of
    `load_datasets`.
    """
    rows = load_datasets(spec, seed=config.train.seed, **part)
    return prompts_of(config, rows_of, tokenizer, rows, model=model)


def prompts_of(
    config: settings.Sampling,
    rows_of: Callable[..., T],
    tokenizer: PreTrainedTokenizerBase,
    rows: Table,
    *,
    model: str | None,
    generates: bool = True,
) -> T:
    """Return rows as `rows_of` makes them: prompts, with the columns and templates of --data.*.
    Raises DataError.

    `model`: the flag of the model of `tokenizer`, with its value, whose text format is the default;
    None: there is none. `generates`: the model answers these prompts.
    """
    data = recognise(
        rows, config, "text", answers="label_key" if config.reward.needs_labels else "output_key"
    )
    if config.reward.needs_labels and not data.label_key:
        raise DataError(
            f"--reward.verifier {config.reward.verifier} checks responses against labels: name their column with "
            f"--data.label_key. The dataset has {list_columns(rows.column_names)}."
        )
    if model:
        prompts = (
            None if config.train.agent_func_path else data.input_key
        )  # an agent renders its own prompts
        data = with_trained_format(
            config, data, tokenizer, rows, column=prompts, model=model, generates=generates
        )
    return rows_of(rows, tokenizer, data)


def look_at_prompts(
    config: settings.Sampling,
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    policy: str,
    flag: str,
) -> None:
    """Print notices about the first prompts, and record their format in the tokenizer.

    Raises DataError if text is lost.
    """
    first = [prompts[number] for number in range(min(first_look.FIRST_ROWS, len(prompts)))]
    texts = [prompt.text for prompt in first]
    used, trained = (
        first_look.TextFormat.of(prompts.data, tokenizer),
        first_look.recorded(tokenizer),
    )
    found = first_look.round_trip(tokenizer, texts, prompts=True) + first_look.joined_border(
        used, tokenizer
    )
    used = kept_format(used, tokenizer, texts)
    found += first_look.compare_formats(f"{flag} {policy}", trained, used, texts)
    if not config.train.agent_func_path:  # an agent renders its own prompts
        applied = prompts.data.apply_chat_template
        found += first_look.unused_chat_template(
            f"{flag} {policy}", tokenizer, texts, applied=applied
        )
    if prompts.data.apply_chat_template or config.train.agent_func_path:
        report(first_look.dated_template(tokenizer))
    check_reward_formats(config, used, texts)
    if trained and trained.ending:
        used = replace(used, ending=trained.ending)
        found += first_look.end_notices(
            trained.ending, tokenizer, f"In training, the responses of {flag} {policy}"
        )
    if used.chat_template:
        found += first_look.chat_end(tokenizer, ends_of_generation(config, tokenizer, policy))
    first_look.record(tokenizer, used)
    notice(*found)


def check_prompts(config: settings.Sampling, prompts: PromptDataset) -> None:
    """Check the length and the label of every prompt. Raises DataError; without agents, which make
    prompts of their own.
    """
    if config.train.agent_func_path:
        return
    findings = [
        first_look.check_answer_room(
            prompts.lengths(),
            max_len=config.data.max_len,
            max_new_tokens=config.rollout.max_new_tokens,
        )
    ]
    verifier, column = config.reward.verifier, config.data.label_key
    if verifier and column:
        findings.append(
            check_labels(verifier, prompts.labels(), column=column, origin=prompts.origin)
        )
    report(*findings)


def check_reward_formats(
    config: settings.Sampling, used: first_look.TextFormat, texts: Sequence[str]
) -> None:
    """Print a notice about each reward model that was trained with other prompts than these texts
    of the format `used`.
    """
    for path in config.reward.models:
        judge = get_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        flag, trained = f"--reward.model_name_or_path {path}", first_look.recorded(judge)
        notice(*first_look.compare_formats(flag, trained, used, texts))
        notice(
            *first_look.unused_chat_template(flag, judge, texts, applied=bool(used.chat_template))
        )


def ends_of_generation(
    config: settings.Sampling, tokenizer: PreTrainedTokenizerBase, policy: str
) -> set[str]:
    """The texts at which the engine stops, from the tokenizer, the model's generation_config.json
    and the flags.
    """
    numbers = [*end_ids(policy), *config.rollout.stop_token_ids]
    return {
        str(tokenizer.eos_token),
        *config.rollout.stop,
        *map(str, tokenizer.convert_ids_to_tokens(numbers)),
    }


def load_pretraining_text(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainingMix:
    """The rows of --algo.ptx.dataset; every token of them is a target. Raises DataError."""
    ptx, data = config.algo.ptx, config.data
    most, seed = data.max_samples, config.train.seed
    rows = load_datasets(
        ptx.dataset or "", split=ptx.split, probs=ptx.probs, max_samples=most, seed=seed
    )
    text = SFTDataset(
        rows,
        tokenizer,
        SFTDataConfig(max_len=data.max_len, input_key=data.input_key),
        pretrain=True,
    )
    return PretrainingMix(text, batch_size=config.train.batch_size, seed=config.train.seed)


def check_reward_models(
    config: settings.Sampling, tokenizer: PreTrainedTokenizerBase, *, policy: str
) -> None:
    """Raise ModelError if one is no reward model or lacks what a flag needs, and DataError for
    another vocabulary than the policy's.
    """
    trusts, normalize = config.model.trust_remote_code, config.reward.normalize_enable
    for path in config.reward.scalars:
        check_is_scalar(
            settings.load_spec(config, path),
            head_prefix=config.ds.value_head_prefix,
            normalize=normalize,
        )
        require_vocabulary(
            tokenizer,
            path,
            flag="--reward.model_name_or_path",
            owner=policy,
            trust_remote_code=trusts,
        )
    if path := config.reward.process_model:
        spec = settings.load_spec(config, path)
        step_tokens(spec)
        check_causal_lm(spec)
        require_vocabulary(
            tokenizer, path, flag="--reward.process_model", owner=policy, trust_remote_code=trusts
        )
