"""`openrlhf interactive_chat`: a conversation with a model, whose answers appear as they are
sampled.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from openrlhf.config.flags import amend, text_of
from openrlhf.config.inference import ChatConfig
from openrlhf.data.first_look import TextFormat, joined_border, recorded
from openrlhf.data.messages import Message
from openrlhf.data.shown import show_text
from openrlhf.data.templates import encode, fill_template, render
from openrlhf.data.tokenizer import end_ids, require_chat_template
from openrlhf.launch import settings
from openrlhf.launch.prompt_data import policy_tokenizer
from openrlhf.models.loading import load_causal_lm

PLAIN = "User: {}\nAssistant: "  # for a model of which nothing is known


def run_chat(config: ChatConfig) -> None:
    """Answer the messages of standard input until it ends. Raises DataError or ModelError."""
    path = config.model.model_name_or_path
    tokenizer = policy_tokenizer(config, path, flag="--model.model_name_or_path")
    chat = Chat(config=config, tokenizer=tokenizer, template=template_of(config, tokenizer))
    print(
        f"{path}, with {f'the template {chat.template!r}' if chat.template else 'its chat template'}.",
        flush=True,
    )
    if config.dry_run:
        return print(show_text("the prompt 'Hello'", chat.read("Hello"), tokenizer))
    model = load_causal_lm(replace(settings.load_spec(config, path), spread=True)).eval()
    chat.config = decide_sampling(config, model)
    print("/reset begins anew, /exit ends, Ctrl-C stops an answer.", flush=True)
    with suppress(EOFError):
        while (message := input("> " if sys.stdin.isatty() else "").strip()) not in (
            "/exit",
            "exit",
        ):
            if message in ("/reset", "clear"):
                chat.turns.clear()
            elif message:
                chat.answer(message, model)


def decide_sampling(config: ChatConfig, model: Any) -> ChatConfig:
    """Return the configuration with the repetition penalty in effect, and let the flags decide
    everything else.

    Without `--rollout.repetition_penalty`, the penalty is the one of the model's generation
    configuration, or none. `generate` would fill in other values of that configuration, such as
    `num_beams`, beside the flags.
    """
    recommended = model.generation_config.repetition_penalty
    model.generation_config = GenerationConfig()
    if "rollout.repetition_penalty" in config.given or not recommended:
        return config
    return amend(config, {"rollout.repetition_penalty": recommended})


def template_of(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text around a message, or None for the chat template: as the flags say, else as the model
    was trained.
    """
    data, trained = config.data, recorded(tokenizer)
    if data.apply_chat_template:
        require_chat_template(tokenizer)
        return None
    if data.input_template or not trained:
        return data.input_template or (None if tokenizer.chat_template else PLAIN)
    return None if trained.chat_template else trained.input_template or "{}"


class Printed(TextStreamer):
    """Prints an answer while it is sampled, whole words at a time, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.whole = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print and keep a part of the answer."""
        self.whole += text
        print(text, end="", flush=True)


@dataclass(kw_only=True)
class Chat:
    """A conversation. Without a `template`, the tokenizer's chat template renders it."""

    config: ChatConfig
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    turns: list[tuple[str, str]] = field(
        default_factory=list[tuple[str, str]]
    )  # a message and its answer each

    def __post_init__(self) -> None:
        if joined_border(TextFormat(input_template=self.template), self.tokenizer):
            self.template = str(self.template)[
                :-1
            ]  # the model has learned the space with the answer
        preamble = text_of("--preamble", file).strip() if (file := self.config.preamble) else ""
        self.before = "\n".join(filter(None, (self.config.system, preamble)))
        self.ends = [*end_ids(self.config.model.model_name_or_path), self.tokenizer.eos_token_id]

    def text(self, message: str) -> str:
        """Everything that has been said, and a new message, as the model reads it."""
        turns, suffix = [*self.turns, (message, "")], self.config.csft.suffix
        if self.template is not None:
            said = [fill_template(self.template, asked) + answer for asked, answer in turns]
            return "\n".join(filter(None, (self.before, *said))) + suffix
        messages: list[Message] = (
            [{"role": "system", "content": self.before}] if self.before else []
        )
        for asked, answer in turns:
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ]
        return render(self.tokenizer, messages[:-1], add_generation_prompt=True) + suffix

    def read(self, message: str) -> list[int]:
        """The tokens that the model reads before it answers. Turns that leave no room for an answer
        are forgotten.
        """
        room = self.config.data.max_len - (self.config.rollout.max_new_tokens or 1)
        while (
            len(tokens := encode(self.tokenizer, [self.text(message)])[0].tokens) > room
            and self.turns
        ):
            del self.turns[0]
            print("[notice] The oldest turn no longer fits into --data.max_len and is forgotten.")
        return tokens[-room:]

    @torch.no_grad()
    def answer(self, message: str, model: Any) -> None:
        """Print the answer to a message while it is sampled, and remember both. Ctrl-C ends the
        answer.
        """
        rollout, max_len = self.config.rollout, self.config.data.max_len
        read, printed = (
            torch.tensor([self.read(message)], device=model.device),
            Printed(self.tokenizer),
        )
        try:
            model.generate(
                read,
                attention_mask=torch.ones_like(read),
                max_new_tokens=min(rollout.max_new_tokens or max_len, max_len - read.shape[1]),
                do_sample=True,
                temperature=rollout.temperature or 1.0,
                top_k=max(0, rollout.top_k) if rollout.temperature else 1,  # the most likely token
                top_p=rollout.top_p,
                repetition_penalty=rollout.repetition_penalty,
                eos_token_id=[*self.ends, *rollout.stop_token_ids],
                pad_token_id=self.tokenizer.eos_token_id,
                stop_strings=list(rollout.stop) or None,
                tokenizer=self.tokenizer,
                streamer=printed,
            )
        except KeyboardInterrupt:
            printed.end()
            print(" [stopped]", end="")
        print("" if printed.whole.strip() else "(The answer is empty.)", flush=True)
        self.turns.append((message, printed.whole))
