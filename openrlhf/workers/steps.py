"""Rewards from a process reward model, which scores a response after each step."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.core.batches import TokenRows
from openrlhf.data.steps import one_token
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.models.loading import LoadSpec, step_tokens
from openrlhf.models.policy import LogitModel, reduced_logits
from openrlhf.training.strategy import FrozenModel, Strategy


class StepScorer:
    """A frozen process reward model.

    Raises ModelError if the model does not declare its step tokens.
    """

    def __init__(
        self, strategy: Strategy, load: LoadSpec, *, separator: str, offload: bool
    ) -> None:
        tokenizer = get_tokenizer(load.path, trust_remote_code=load.trust_remote_code)
        placeholder_text, judgement_texts = step_tokens(load)
        placeholder = one_token(tokenizer, placeholder_text, "placeholder_token")
        self.cutter = StepCutter(tokenizer, separator, placeholder)
        judgements = [one_token(tokenizer, text, "reward_tokens") for text in judgement_texts]
        self.judgements = torch.tensor(judgements)
        self.model = FrozenModel(strategy, partial(LogitModel.load, load), offload=offload)

    def rewards(self, answers: TokenRows) -> Float[Tensor, " N"]:
        """Return P(correct) ÷ number of steps at the last token of each step, and 0 elsewhere.

        A response's rewards therefore add up to the mean P(correct) of its steps. The targets of
        `answers` are the sampled tokens.
        """
        device = answers.tokens.device
        lengths = answers.lengths.tolist()
        texts: list[list[int]] = []
        judged: list[list[bool]] = []
        places: list[int] = []
        shares: list[float] = []
        start = 0
        for row, mask in zip(
            answers.tokens.split(lengths), answers.loss_mask.split(lengths), strict=True
        ):
            tokens = row.tolist()
            ends = self.cutter.ends(tokens, mask.tolist())
            text, placeholders = self.cutter.marked(tokens, ends)
            texts.append(text)
            judged.append(placeholders)
            places += [start + end for end in ends]
            shares += [1 / len(ends)] * len(ends)
            start += len(tokens)
        rows = TokenRows.from_lists(texts, judged).to(device)
        outputs = reduced_logits(
            self.model,
            rows.tokens,
            rows.offsets,
            rows.loss_mask,
            lambda logits, _: logits[:, self.judgements.to(device)],
        )
        column = torch.zeros(answers.num_tokens, device=device)
        correct = outputs.values.softmax(-1)[:, 0]
        column[torch.tensor(places, device=device)] = correct * torch.tensor(shares, device=device)
        return column


class StepCutter:
    """A splitter that divides responses into steps.

    A step ends with `separator`, and the last step ends with the response. Blank text does not
    count as a step.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, separator: str, placeholder: int
    ) -> None:
        self.separator = separator
        self.placeholder = placeholder
        self.piece: Callable[[int], str] = cache(
            lambda token: str(tokenizer.decode([token], skip_special_tokens=True))
        )

    def ends(self, tokens: Sequence[int], sampled: Sequence[bool]) -> list[int]:
        """Return the index of each step's last token.

        A response without text has one step, which ends with the response's last sampled token or,
        if no token was sampled, with its last token.
        """
        ends: list[int] = []
        step = ""
        last: int | None = None  # last token with text in the current step
        actions = [place for place, is_action in enumerate(sampled) if is_action]
        for place in actions:
            piece = self.piece(tokens[place])
            step = (step + piece).lstrip()
            if step.strip() and piece:
                last = place
            if tokens[place] == self.placeholder or (step and self.separator in step):
                ends.append(place)
                step = ""
                last = None
        if last is not None:
            ends.append(last)
        return ends or actions[-1:] or [len(tokens) - 1]

    def marked(self, tokens: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return the tokens up to the last step, with a placeholder after each step, and a mask.

        The mask is True at the placeholders. A step that already ends with a placeholder does not
        get a second placeholder.
        """
        text: list[int] = []
        judged: list[bool] = []
        begin = 0
        for end in ends:
            step = [*tokens[begin : end + 1]]
            if step[-1] != self.placeholder:
                step.append(self.placeholder)
            text += step
            judged += [False] * (len(step) - 1) + [True]
            begin = end + 1
        return text, judged
