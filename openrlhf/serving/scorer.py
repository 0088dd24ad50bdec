"""A trained reward model as a function from texts to scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.batches import offsets_of
from openrlhf.config.serving import ServeConfig
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.models.loading import LoadSpec, ModelError
from openrlhf.models.scalar import ScalarModel, last_token_scores, load_scalar


class TextTokenizer:
    """Token ids of texts as they are, nothing added; of long ones `max_len`: the last, or with `keep_start` the first.

    An end-of-text token at the end of a text stays: the score is read there, as in the training of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_len: int, keep_start: bool) -> None:
        self.tokenizer, self.max_len, self.keep_start = tokenizer, max_len, keep_start

    def __call__(self, texts: list[str]) -> list[list[int]]:
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [self._cut(tokens) for tokens in encoded["input_ids"]]

    def _cut(self, tokens: list[int]) -> list[int]:
        if len(tokens) <= self.max_len:
            return tokens
        if not self.keep_start:
            return tokens[-self.max_len :]
        last = tokens[-1] if tokens[-1] == self.tokenizer.eos_token_id else tokens[self.max_len - 1]
        return [*tokens[: self.max_len - 1], last]


class RewardScorer:
    """The model's output at the last token of each text, as a reward worker reads it.

    Texts of similar lengths go through the model together, at most `max_texts` (None: any number) and `max_tokens` at once,
    padding included.
    """

    def __init__(self, model: ScalarModel, *, max_texts: int | None, max_tokens: int) -> None:
        self.model = model
        self.max_texts, self.max_tokens = max_texts, max_tokens

    def __call__(self, texts: list[list[int]]) -> list[float]:
        scores = [0.0] * len(texts)
        lengths = list(map(len, texts))
        for rows in similar_lengths(
            lengths, max_rows=self.max_texts, max_tokens=self.max_tokens, padded=not self.model.packing
        ):
            for row, score in zip(rows, self._forward([texts[row] for row in rows]), strict=True):
                scores[row] = score
        return scores

    def _forward(self, texts: list[list[int]]) -> list[float]:
        device = self.model.hf.device
        tokens = torch.tensor([token for text in texts for token in text], device=device)
        offsets = offsets_of([len(text) for text in texts]).to(device)
        with torch.inference_mode():
            return last_token_scores(self.model(tokens, offsets).values, offsets).tolist()


def similar_lengths(lengths: Sequence[int], *, max_rows: int | None, max_tokens: int, padded: bool) -> list[list[int]]:
    """Row numbers in parts of similar lengths, longest first, each within both limits or a single row.

    `padded`: a row costs as many tokens as the longest of its part.
    """
    parts: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        cost = lengths[parts[-1][0]] if parts and padded else lengths[row]
        tokens += cost
        if not parts or tokens > max_tokens or len(parts[-1]) == max_rows:
            parts.append([])
            tokens = lengths[row]
        parts[-1].append(row)
    return parts


def load_scorer(config: ServeConfig) -> tuple[TextTokenizer, RewardScorer]:
    """Tokenizer and model as the flags say, tried once. Raises DataError or ModelError."""
    path = config.reward.model_name_or_path
    tokenizer = get_tokenizer(
        path, use_fast=not config.data.disable_fast_tokenizer, trust_remote_code=config.model.trust_remote_code
    )
    tokenize = TextTokenizer(tokenizer, max_len=config.data.max_len, keep_start=config.truncation_side == "right")
    spec = LoadSpec(
        path=path,
        param_dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        packing=config.ds.packing_samples,
        trust_remote_code=config.model.trust_remote_code,
        device_map="auto" if torch.cuda.is_available() else None,
    )
    try:
        model = load_scalar(
            spec, head_prefix=config.ds.value_head_prefix, require_head=True, normalize=config.reward.normalize_enable
        )
        embeddings = model.hf.get_input_embeddings().get_parameter("weight").shape[0]
        if len(tokenizer) > embeddings:
            raise ModelError(
                f"{path} has embeddings for {embeddings} tokens, but its tokenizer knows {len(tokenizer)}."
            )
        scorer = RewardScorer(model.eval(), max_texts=config.batch_size, max_tokens=config.max_batch_tokens)
        scorer(tokenize([str(tokenizer.eos_token)]))
    except ValueError as error:
        raise ModelError(str(error)) from error
    return tokenize, scorer
