"""`openrlhf interactive_chat`, a chat with a model that streams its answers."""

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
from openrlhf.reporting import notice, say

PLAIN = "User: {}\nAssistant: "  # default for a model without a recorded format or a chat template
EXIT = ("/exit", "exit")
RESET = ("/reset", "clear")


def run_chat(config: ChatConfig) -> None:
    """Answer messages from standard input until it ends. Raises DataError or ModelError."""
    path = config.model.model_name_or_path
    tokenizer = policy_tokenizer(config, path, flag="--model.model_name_or_path")
    chat = Chat(config=config, tokenizer=tokenizer, template=template_of(config, tokenizer))
    template = "its chat template"
    if chat.template:
        template = f"the template {chat.template!r}"
    say(f"Chatting with {path}, using {template}.")
    if config.dry_run:
        say(show_text("the prompt 'Hello'", chat.read("Hello"), tokenizer))
        return
    model = load_causal_lm(replace(settings.load_spec(config, path), spread=True)).eval()
    chat.config = decide_sampling(config, model)
    say("/reset starts a new conversation, /exit quits, Ctrl-C stops an answer.")
    cursor = ""
    if sys.stdin.isatty():
        cursor = "> "
    with suppress(EOFError):
        while (message := input(cursor).strip()) not in EXIT:
            if message in RESET:
                chat.turns.clear()
            elif message:
                chat.answer(message, model)


def decide_sampling(config: ChatConfig, model: Any) -> ChatConfig:
    """Return the configuration with the effective repetition penalty.

    If --rollout.repetition_penalty is not set, the penalty in the model's generation configuration
    is used, if any. The generation configuration is then reset, because `generate` would apply its
    other values, such as `num_beams`, in addition to the flags.
    """
    recommended = model.generation_config.repetition_penalty
    model.generation_config = GenerationConfig()
    if "rollout.repetition_penalty" in config.given or not recommended:
        return config
    return amend(config, {"rollout.repetition_penalty": recommended})


def template_of(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the template for a message, or None for the chat template.

    Flags take precedence over the format that the model was trained with.
    """
    data = config.data
    trained = recorded(tokenizer)
    if data.apply_chat_template:
        require_chat_template(tokenizer)
        return None
    if data.input_template:
        return data.input_template
    if trained:
        if trained.chat_template:
            return None
        return trained.input_template or "{}"
    if tokenizer.chat_template:
        return None
    return PLAIN


class Printed(TextStreamer):
    """A streamer that prints an answer word by word as it is sampled, and keeps its text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.whole = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print and keep a chunk of the answer."""
        self.whole += text
        say(text, end="")


@dataclass(kw_only=True)
class Chat:
    """A conversation, rendered by the tokenizer's chat template if `template` is None."""

    config: ChatConfig
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    turns: list[Message] = field(default_factory=list[Message])  # messages and their answers

    def __post_init__(self) -> None:
        if joined_border(TextFormat(input_template=self.template), self.tokenizer):
            # In training, the tokenizer merged the last space with the answer.
            self.template = str(self.template)[:-1]
        preamble = ""
        if self.config.preamble:
            preamble = text_of("--preamble", self.config.preamble).strip()
        self.system = "\n".join(filter(None, (self.config.system, preamble)))
        self.ends = [*end_ids(self.config.model.model_name_or_path), self.tokenizer.eos_token_id]

    def text(self, message: str) -> str:
        """Render the conversation and a new message as the model's prompt."""
        suffix = self.config.csft.suffix
        messages = [*self.turns, {"role": "user", "content": message}]
        if self.template is None:
            if self.system:
                messages.insert(0, {"role": "system", "content": self.system})
            return render(self.tokenizer, messages, add_generation_prompt=True) + suffix
        parts = [self.system]
        for turn in messages:
            if turn["role"] == "user":
                parts.append(fill_template(self.template, turn["content"]))
            else:
                parts[-1] += turn["content"]
        return "\n".join(filter(None, parts)) + suffix

    def read(self, message: str) -> list[int]:
        """Return the prompt tokens for a message.

        Drops the oldest turns until there is room for an answer.
        """
        room = self.config.data.max_len - (self.config.rollout.max_new_tokens or 1)
        while True:
            [encoded] = encode(self.tokenizer, [self.text(message)])
            if len(encoded.tokens) <= room or not self.turns:
                return encoded.tokens[-room:]
            del self.turns[:2]
            notice("The conversation exceeds --data.max_len. Dropping its oldest turn.")

    @torch.no_grad()
    def answer(self, message: str, model: Any) -> None:
        """Stream the answer to the terminal, and append the message and the answer to `turns`.

        Ctrl-C interrupts the answer.
        """
        rollout = self.config.rollout
        max_len = self.config.data.max_len
        top_k = max(0, rollout.top_k)
        if not rollout.temperature:
            top_k = 1  # greedy decoding
        prompt = torch.tensor([self.read(message)], device=model.device)
        printed = Printed(self.tokenizer)
        try:
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(rollout.max_new_tokens or max_len, max_len - prompt.shape[1]),
                do_sample=True,
                temperature=rollout.temperature or 1.0,
                top_k=top_k,
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
            say(" [stopped]", end="")
        if not printed.whole.strip():
            say("(The answer is empty.)", end="")
        say("")
        self.turns.append({"role": "user", "content": message})
        self.turns.append({"role": "assistant", "content": printed.whole})
