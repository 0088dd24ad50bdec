"""Loads tokenizers: padding token, padding side, chat template and stop tokens."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from openrlhf.data.errors import DataError

# This ratio is far above the ratio in ordinary text. Longer texts cannot fit and may take minutes
# to tokenize.
CHARACTERS_PER_TOKEN = 64
LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # of Transformers
FEWEST_CHARACTERS = 1 << 16


def get_tokenizer(
    path: str,
    *,
    padding_side: str = "right",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    flag: str = "--model.model_name_or_path",
) -> PreTrainedTokenizerBase:
    """Load the tokenizer from a model folder or the Hub.

    A missing padding token defaults to end-of-text. `chat_template` replaces the tokenizer's
    template. `flag` is the flag that names the model. Raises DataError if no tokenizer is found, if
    it requires untrusted code from the model's repository, or if it has no end-of-text token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError, AttributeError, ImportError) as error:
        raise DataError(_explain(path, error, flag)) from error
    # Transformers builds this tokenizer from config.json if there are no tokenizer files.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise DataError(
            f"{path!r} has no tokenizer: the vocabulary is empty. Add the tokenizer's files."
        )
    if tokenizer.eos_token is None:
        raise DataError(
            f"The tokenizer of {path!r} has no end-of-text token (eos_token), which must end every "
            "training text. Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = padding_side
    # Suppress this warning: our own flags limit lengths, and the run reports truncated texts.
    tokenizer.deprecation_warnings[LENGTH_WARNING] = True
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def most_characters(max_tokens: int) -> int:
    """Return the number of characters above which a text is rejected or truncated.

    `max_tokens` is the maximum number of tokens used from the text.
    """
    return max(FEWEST_CHARACTERS, CHARACTERS_PER_TOKEN * max_tokens)


def end_ids(path: str) -> list[int]:
    """Return a model's stop tokens from its generation_config.json.

    Returns an empty list if the file does not exist.
    """
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError):
        return []
    if isinstance(ids, int):
        return [ids]
    return ids or []


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The tokens that stop generation: end-of-text and those in generation_config.json."""

    texts: list[str]  # end-of-text comes first
    ids: list[int]
    marks: list[str]  # tokens that are not part of the text, such as end-of-turn

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the stop tokens of the tokenizer's model."""
        end_of_text = int(str(tokenizer.eos_token_id))
        ids = [end_of_text]
        if tokenizer.name_or_path:
            others = end_ids(tokenizer.name_or_path)
            ids += [end for end in others if end != end_of_text and end < len(tokenizer)]
        texts = list(map(str, tokenizer.convert_ids_to_tokens(ids)))
        return cls(texts=texts, ids=ids, marks=added_tokens(tokenizer))


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens added to the vocabulary, such as the end-of-turn token."""
    vocabulary: Any = tokenizer.get_added_vocab  # Transformers types this as a special token
    return list(vocabulary())


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of these tokens, or nothing if there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def require_vocabulary(
    tokenizer: PreTrainedTokenizerBase, path: str, *, flag: str, owner: str, trust_remote_code: bool
) -> None:
    """Raise DataError unless the model at `path` has the same token ids as `tokenizer`.

    The model at `path`, named by `flag`, receives tokens from `tokenizer`. `owner` is the flag of
    the tokenizer's model, with its value.
    """
    theirs = get_tokenizer(path, trust_remote_code=trust_remote_code, flag=flag).get_vocab()
    ours = tokenizer.get_vocab()
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    if not differing:
        return
    raise DataError(
        f"{flag} {path} has a different vocabulary from {owner}: {len(differing)} of {len(ours)} "
        f"tokens have a different id or are missing, for example {differing[0]!r}. Use a "
        "model with the same tokenizer, or serve a reward model and pass --reward.remote_url."
    )


def _explain(path: str, error: Exception, flag: str) -> str:
    """Explain why a tokenizer could not be loaded."""
    if "trust_remote_code" in str(error):
        return (
            f"The tokenizer of {path!r} needs code from the model's repository, which only runs if "
            "you allow it. Review the code, then pass --model.trust_remote_code."
        )
    what = "treated as a hub name, because the folder does not exist"
    if os.path.isdir(path):
        what = f"a folder with {sorted(os.listdir(path))[:10]}"
    return f"No tokenizer could be loaded from {flag} {path!r} ({what}): {error}"


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the tokenizer has no chat template."""
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            f"--data.apply_chat_template is set, but the tokenizer of {tokenizer.name_or_path!r} "
            "has no chat template. Add chat_template.jinja to its folder (SFT also takes "
            "--data.tokenizer_chat_template), or use --data.input_template instead."
        ) from error
