"""`openrlhf interactive_chat`: a conversation with a model, whose answers appear as they are sampled."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.config.inference import ChatConfig
from openrlhf.data.first_look import recorded
from openrlhf.data.templates import Message, encode, fill_template, render
from openrlhf.data.tokenizer import require_chat_template
from openrlhf.distributed.cluster import ray_cluster
from openrlhf.distributed.placement import Placement, engine_group
from openrlhf.evaluation.runs import engines
from openrlhf.launch import settings
from openrlhf.launch.prompt_data import policy_tokenizer
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import engine_device
from openrlhf.rollout.fleet import Fleet
from openrlhf.trajectory import Prompt

HELP = "/reset begins anew, /system TEXT sets the system prompt, /exit ends. Ctrl-C stops an answer."
PLAIN = "User: {}\nAssistant: "  # for a model of which nothing is known
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a character is decoded whose tokens are not all there


def run_chat(config: ChatConfig) -> None:
    """Answer the messages of standard input until it ends. Raises DataError or ModelError."""
    check_engine_args(config.vllm.engine_args, kind := engine_device())
    path = str(config.model.model_name_or_path)
    tokenizer = policy_tokenizer(config, path, flag="--model.model_name_or_path")
    chat = Chat(config=config, tokenizer=tokenizer, template=template_of(config, tokenizer))
    shown = f"the template {chat.template!r}" if chat.template else "the tokenizer's chat template"
    if config.dry_run:
        return print(f"{path}, with {shown}. First prompt: {chat.text('Hello')!r}")
    group, log_dir = engine_group(config.vllm, "vllm"), tempfile.mkdtemp(prefix="openrlhf-chat-")
    with (
        ray_cluster(Placement(groups=(group,), on_gpus=kind == "cuda")),
        engines(config, path, tokenizer, kind, name="vllm", log_dir=log_dir) as fleet,
        closing(BackgroundLoop()) as loop,
    ):
        print(f"{path}, with {shown}. {HELP}")
        for line in lines():
            match line.split(maxsplit=1):
                case ["/exit" | "exit"]:
                    return
                case ["/reset" | "clear"]:
                    chat.turns.clear()
                case ["/system", *text]:
                    chat.system = "".join(text)
                case [word, *_] if word.startswith("/"):
                    print(HELP)
                case [_, *_]:
                    chat.answer(line, fleet, loop)


def template_of(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text around a message, or None for the chat template: as the flags say, else as the model was trained."""
    data, trained = config.data, recorded(tokenizer)
    own = trained.input_template if trained and not data.apply_chat_template else None
    if template := data.input_template or own:
        return template
    if data.apply_chat_template or tokenizer.chat_template:
        require_chat_template(tokenizer)
        return None
    return PLAIN


def lines() -> Iterator[str]:
    """What the user types, until the end of the input."""
    with suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "").strip()


@dataclass(kw_only=True)
class Chat:
    """A conversation. Without a `template`, the tokenizer's chat template renders it."""

    config: ChatConfig
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    turns: list[list[Message]] = field(default_factory=list[list[Message]])  # a message and its answer each

    def __post_init__(self) -> None:
        file = self.config.preamble
        self.system = self.config.system or ""
        self.preamble = Path(file).expanduser().read_text(encoding="utf-8").strip() if file else ""

    def text(self, message: str) -> str:
        """Everything that has been said, and a new message, as the model reads it."""
        csft = f" {self.config.csft.prompt.strip()} " if self.config.csft.enable else ""
        before = "\n".join(filter(None, (self.system, self.preamble)))
        if self.template is None:
            said = [message for turn in self.turns for message in turn]
            first = [{"role": "system", "content": before}] if before else []
            asked = [*first, *said, {"role": "user", "content": message}]
            return render(self.tokenizer, asked, add_generation_prompt=True) + csft
        turns = [fill_template(self.template, asked["content"]) + answer["content"] for asked, answer in self.turns]
        return "\n".join(filter(None, (before, *turns, fill_template(self.template, message)))) + csft

    def answer(self, message: str, fleet: Fleet, loop: BackgroundLoop) -> None:
        """Print the answer to a message while it is sampled, and remember both. Ctrl-C ends the answer."""
        spec, tokenizer, length = settings.inference_sampling(self.config, samples=1), self.tokenizer, len(self.turns)
        while len(tokens := encode(tokenizer, [self.text(message)])[0].tokens) > spec.prompt_room and self.turns:
            del self.turns[0]
        if forgotten := length - len(self.turns):
            print(f"[notice] The oldest {forgotten} turn(s) no longer fit into --data.max_len and are forgotten.")
        if len(tokens) > spec.prompt_room:
            print(f"[notice] The message is too long for --data.max_len: its last {spec.prompt_room} tokens are used.")
        tokens = spec.clip_prompt(tokens)
        [params] = spec.params_for(Prompt(index=length, text=message, tokens=tokens), len(tokens))
        sampled, printed = list[int](), ""
        try:
            for piece in loop.iterate(fleet.stream(tokens, params), self.config.train.step_timeout):
                sampled += piece
                text = str(tokenizer.decode(sampled, skip_special_tokens=True))
                if not text.endswith(INCOMPLETE):
                    print(text[len(printed) :], end="", flush=True)
                    printed = text
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(flush=True)
        self.turns.append([{"role": "user", "content": message}, {"role": "assistant", "content": printed}])
