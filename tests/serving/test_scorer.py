"""The scorer: scores match Transformers, long texts are truncated, and bad models are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Gemma2Config

from openrlhf.checks import CheckError
from openrlhf.config.flags import amend
from openrlhf.config.serving import ServeConfig
from openrlhf.data.tokenizer import most_characters
from openrlhf.models.loading import ModelError
from openrlhf.serving.scorer import load_scorer, tokenize_texts
from openrlhf.serving.server import run_server
from tests.tiny import SIZES, character_tokenizer, save_tiny_model, tiny_config

TEXTS = ["1+1=2<eos>", "a", "what is this? a text.<eos>", "12345<eos>", "no end", "0<eos>"]


def save_reward_model(path: Path, kind: str = "llama", **config: Any) -> Path:
    torch.manual_seed(0)
    hf = AutoModelForSequenceClassification.from_config(
        tiny_config(kind, num_labels=1, **config)
    ).float()
    hf.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def scores(path: Path, texts: list[str] = TEXTS, **flags: Any) -> list[float]:
    """Return the scores from a server with these flags; `__` in a name stands for a dot."""
    values = {name.replace("__", "."): value for name, value in flags.items()}
    start = {
        "reward.model_name_or_path": str(path),
        "ds.param_dtype": "fp32",
        "ds.attn_implementation": "sdpa",
    }
    tokenize, score = load_scorer(amend(ServeConfig(), start | values))
    return score(tokenize(texts))


def plain(
    path: Path, texts: list[str] = TEXTS, *, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Compute the scores with Transformers, one text at a time."""
    hf = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).eval()
    ids = [character_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [float(hf(torch.tensor([row])).logits) for row in ids]


@pytest.mark.parametrize(
    "limits", [{}, {"batch_size": 1}, {"batch_size": 2}, {"max_batch_tokens": 26}]
)
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral-windowed"])
def test_scores_match_transformers_for_any_split_into_batches(
    tmp_path: Path, kind: str, packing: bool, limits: dict[str, int]
) -> None:
    path = save_reward_model(tmp_path, kind)
    found = scores(path, ds__packing_samples=packing, **limits)
    assert found == pytest.approx(plain(path), abs=1e-6)
    assert len({round(score, 5) for score in found}) == len(TEXTS)


def test_normalize_enable_applies_the_stored_mean_and_deviation(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, mean=0.5, std=2.0)
    expected = [(score - 0.5) / 2 for score in plain(path)]
    assert scores(path, reward__normalize_enable=True) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_half_precision_scores_are_close_to_transformers(
    tmp_path: Path, dtype: str, torch_dtype: torch.dtype
) -> None:
    path = save_reward_model(tmp_path)
    expected = plain(path, dtype=torch_dtype)
    assert scores(path, ds__param_dtype=dtype) == pytest.approx(expected, abs=5e-3)


def test_dry_run_loads_the_model_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save_reward_model(tmp_path))
    run_server(
        amend(
            ServeConfig(),
            {
                "reward.model_name_or_path": path,
                "ds.attn_implementation": "sdpa",
                "port": 0,
                "dry_run": True,
            },
        )
    )
    assert path in capsys.readouterr().out


# ---- cutting


def cut(text: str, max_len: int, side: str) -> str:
    tokenizer = character_tokenizer()
    tokens = tokenize_texts([text], tokenizer, max_len=max_len, keep_start=side == "right")[0]
    return tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("text", "max_len", "side", "left_over"),
    [
        ("abcdef<eos>", 4, "left", "def<eos>"),
        ("abcdef<eos>", 4, "right", "abc<eos>"),
        ("abcdef", 4, "left", "cdef"),
        ("abcdef", 4, "right", "abcd"),
        ("abc<eos>", 4, "left", "abc<eos>"),
        ("abc<eos>", 4, "right", "abc<eos>"),
        ("abc<eos>", 1, "left", "<eos>"),
        ("abc<eos>", 1, "right", "<eos>"),
    ],
)
def test_truncated_text_keeps_its_eos_token(
    text: str, max_len: int, side: str, left_over: str
) -> None:
    assert cut(text, max_len, side) == left_over


def test_score_of_a_truncated_text_equals_the_score_of_its_kept_part(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    texts = ["abcdef<eos>", "abcdef"]
    assert scores(path, texts, data__max_len=4) == pytest.approx(
        plain(path, ["def<eos>", "cdef"]), abs=1e-6
    )
    right = scores(path, texts, data__max_len=4, truncation_side="right")
    assert right == pytest.approx(plain(path, ["abc<eos>", "abcd"]), abs=1e-6)


def test_no_special_tokens_are_added_to_a_text() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenize_texts(["ab"], tokenizer, max_len=9, keep_start=False) == [ids]


# ---- rejected models


def test_model_without_a_trained_head_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a language model"):
        scores(Path(save_tiny_model(tmp_path)))


def test_normalize_enable_changes_nothing_for_a_model_without_stored_statistics(
    tmp_path: Path,
) -> None:
    path = save_reward_model(tmp_path)
    assert scores(path, reward__normalize_enable=True) == pytest.approx(plain(path), abs=1e-6)


def test_tokenizer_with_more_tokens_than_the_embeddings_is_rejected(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, vocab_size=40)
    with pytest.raises(ModelError, match=r"40 tokens.* 51"):
        scores(path)


def test_attention_that_cannot_be_packed_is_rejected_at_load_time(
    tmp_path: Path,
) -> None:
    hf = AutoModelForSequenceClassification.from_config(
        Gemma2Config(**SIZES, head_dim=8, num_labels=1)
    ).float()
    hf.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckError, match="softcap"):
        scores(tmp_path, ds__packing_samples=True)


@pytest.mark.parametrize("end", ["", "<eos>", "<eos>x", "x<eos><eos>"])
@pytest.mark.parametrize("keep_start", [False, True])
def test_shortening_a_text_before_tokenization_does_not_change_its_kept_tokens(
    end: str, keep_start: bool
) -> None:
    """The text is much longer than the part that is tokenized or kept."""
    tokenizer = character_tokenizer()
    limit = most_characters(9)
    for length in (limit - 5, limit - len(end), limit, limit + 1, 3 * limit):
        text = "1+2=3" * (length // 5) + "1" * (length % 5)
        assert len(text) == length
        text += end
        [whole] = tokenizer([text], add_special_tokens=False)["input_ids"]
        kept = whole[-9:]
        if keep_start:
            last = whole[-1] if whole[-1] == tokenizer.eos_token_id else whole[8]
            kept = [*whole[:8], last]
        assert tokenize_texts([text], tokenizer, max_len=9, keep_start=keep_start) == [kept]


def test_truncated_text_drops_an_eos_token_from_the_middle_of_the_text() -> None:
    tokenizer = character_tokenizer()
    limit = most_characters(9)
    text = "1" * (limit - 5) + "<eos>" + "2" * 100
    [tokens] = tokenize_texts([text], tokenizer, max_len=9, keep_start=True)
    assert tokens == tokenizer("1" * 9, add_special_tokens=False)["input_ids"]
