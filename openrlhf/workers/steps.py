"""A process reward model as a reward: what it says after each step of an answer."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.batches import TokenRows
from openrlhf.data.steps import one_token
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.distributed.strategy import FrozenModel, Strategy
from openrlhf.models.loading import LoadSpec, step_tokens
from openrlhf.models.policy import LogitModel


class StepScorer:
    """A frozen process reward model. Raises ModelError for a model that does not name its tokens."""

    def __init__(
        self, strategy: Strategy, load: LoadSpec, *, separator: str, offload: bool
    ) -> None:
        tokenizer = get_tokenizer(load.path, trust_remote_code=load.trust_remote_code)
        placeholder, judgements = step_tokens(load)
        self.cutter = StepCutter(
            tokenizer, separator, one_token(tokenizer, placeholder, "placeholder_token")
        )
        self.judgements = torch.tensor(
            [one_token(tokenizer, text, "reward_tokens") for text in judgements]
        )
        self.model = FrozenModel(strategy, partial(LogitModel.load, load), offload=offload)

    def rewards(self, answers: TokenRows) -> Float[Tensor, " N"]:
        """P(right) ÷ number of steps at the last token of each step, else 0: an answer's sum is the
        mean of its steps.

        The targets of `answers` are the sampled tokens.
        """
        lengths, device = answers.lengths.tolist(), answers.tokens.device
        texts, sampled = (
            [row.tolist() for row in column.split(lengths)]
            for column in (answers.tokens, answers.loss_mask)
        )
        ends = [self.cutter.ends(text, mask) for text, mask in zip(texts, sampled, strict=True)]
        marked = [
            self.cutter.marked(text, places) for text, places in zip(texts, ends, strict=True)
        ]
        rows = TokenRows.from_lists(
            [text for text, _ in marked], [judged for _, judged in marked]
        ).to(device)
        outputs = self.model(
            rows.tokens,
            rows.offsets,
            rows.loss_mask,
            lambda logits, _: logits[:, self.judgements.to(device)],
        )
        starts, column = (
            answers.offsets[:-1].tolist(),
            torch.zeros(answers.num_tokens, device=device),
        )
        places = [start + end for start, row in zip(starts, ends, strict=True) for end in row]
        shares = torch.tensor([1 / len(row) for row in ends for _ in row], device=device)
        column[torch.tensor(places, dtype=torch.long, device=device)] = (
            outputs.values.softmax(-1)[:, 0] * shares
        )
        return column


class StepCutter:
    """Cuts answers into steps. A step ends with `separator`, the last one with the answer; blank
    steps are none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, separator: str, placeholder: int
    ) -> None:
        self.separator, self.placeholder = separator, placeholder
        self.piece: Callable[[int], str] = cache(
            lambda token: str(tokenizer.decode([token], skip_special_tokens=True))
        )

    def ends(self, tokens: Sequence[int], sampled: Sequence[bool]) -> list[int]:
        """The place of the last token of each step; of an answer without text, its last sampled
        token.
        """
        found, step, last = list[int](), "", None
        for place, token in enumerate(tokens):
            if not sampled[place]:
                continue
            step = (step + self.piece(token)).lstrip()
            last = place if step.strip() and self.piece(token) else last
            if token == self.placeholder or (step and self.separator in step):
                found.append(place)
                step, last = "", None
        if last is not None:
            found.append(last)
        return found or [
            max((place for place, action in enumerate(sampled) if action), default=len(tokens) - 1)
        ]

    def marked(self, tokens: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[bool]]:
        """The text up to its last step, a placeholder after each step, and where the placeholders
        are.
        """
        text, begin = list[int](), 0
        judged = list[bool]()
        for end in ends:
            step = [
                *tokens[begin : end + 1],
                *([] if tokens[end] == self.placeholder else [self.placeholder]),
            ]
            text += step
            judged += [False] * (len(step) - 1) + [True]
            begin = end + 1
        return text, judged
