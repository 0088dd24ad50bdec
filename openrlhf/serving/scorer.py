"""A trained reward model as a function that maps texts to scores."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.checks import report
from openrlhf.config.serving import ServeConfig
from openrlhf.core.batches import Ragged
from openrlhf.data.tokenizer import get_tokenizer, most_characters
from openrlhf.models.loading import LoadSpec, ModelError
from openrlhf.models.proof import prove_layout
from openrlhf.models.scalar import ScalarModel, check_is_scalar, last_token_scores, load_scalar


def tokenize_texts(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, *, max_len: int, keep_start: bool
) -> list[list[int]]:
    """Tokenize texts without adding special tokens.

    A long text is truncated to its last `max_len` tokens, or to its first tokens with `keep_start`.
    A final end-of-text token is always kept, because the model was trained to output its score
    there. Characters far from the kept tokens are not tokenized, because tokenizing long texts
    without spaces is slow.
    """
    limit = most_characters(max_len)
    end = str(tokenizer.eos_token)
    shortened: list[str] = []
    for text in texts:
        if len(text) > limit:
            ending = end if text.endswith(end) else ""
            text = text[:limit].removesuffix(end) + ending if keep_start else text[-limit:]
        shortened.append(text)
    tokenizer.truncation_side = "right" if keep_start else "left"
    encoded = tokenizer(
        shortened, add_special_tokens=False, truncation=True, max_length=max_len, verbose=False
    )
    for text, tokens in zip(shortened, encoded["input_ids"], strict=True):
        if text.endswith(end):
            tokens[-1] = tokenizer.eos_token_id
    return encoded["input_ids"]


def score_texts(
    texts: list[list[int]], model: ScalarModel, *, max_texts: int | None, max_tokens: int
) -> list[float]:
    """Return the model's output at the last token of each text, as in RL training.

    Each forward pass has texts of similar length. A pass has at most `max_texts` texts (None for no
    limit) and at most `max_tokens` tokens, including padding.
    """
    batch = Ragged.of(texts)
    scores = torch.zeros(len(texts))
    for rows in batch.similar_rows(max_tokens, max_rows=max_texts, padded=not model.packing):
        micro = batch.select(rows).to(model.hf.device)
        with torch.inference_mode():
            output = model(micro.tokens, micro.offsets)
            scores[rows] = last_token_scores(output.values, micro.offsets).cpu()
    return scores.tolist()


def load_scorer(
    config: ServeConfig,
) -> tuple[Callable[[list[str]], list[list[int]]], Callable[[list[list[int]]], list[float]]]:
    """Load the configured model.

    Return a tokenizing function and a scoring function, each of which has been tested once on a
    short text. Raises DataError or ModelError.
    """
    path = config.reward.model_name_or_path
    tokenizer = get_tokenizer(
        path, trust_remote_code=config.model.trust_remote_code, flag="--reward.model_name_or_path"
    )
    keep_start = config.truncation_side == "right"
    tokenize = partial(
        tokenize_texts, tokenizer=tokenizer, max_len=config.data.max_len, keep_start=keep_start
    )
    spec = replace(LoadSpec.of(config, path), spread=True)
    head = config.ds.value_head_prefix
    normalize = config.reward.normalize_enable
    check_is_scalar(spec, head_prefix=head, normalize=normalize)
    model = load_scalar(spec, head_prefix=head, require_head=True, normalize=normalize)
    report(*prove_layout(model))
    embeddings = model.hf.get_input_embeddings().get_parameter("weight").shape[0]
    if len(tokenizer) > embeddings:
        raise ModelError(
            f"The model {path} has embeddings for {embeddings} tokens, but its tokenizer has "
            f"{len(tokenizer)}. Use the tokenizer that the model was trained with."
        )
    score = partial(
        score_texts,
        model=model.eval(),
        max_texts=config.batch_size,
        max_tokens=config.max_batch_tokens,
    )
    score(tokenize([str(tokenizer.eos_token)]))
    return tokenize, score
