"""`openrlhf interactive_chat`: a conversation with a model, whose answers appear as they are sampled."""

import sys
import tempfile
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

PLAIN = "User: {}\nAssistant: "  # for a model of which nothing is known
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a character is decoded whose tokens are not all there


def run_chat(config: ChatConfig) -> None:
    """Answer the messages of standard input until it ends. Raises DataError or ModelError."""
    check_engine_args(config.vllm.engine_args, kind := engine_device())
    path = str(config.model.model_name_or_path)
    tokenizer = policy_tokenizer(config, path, flag="--model.model_name_or_path")
    chat = Chat(config=config, tokenizer=tokenizer, template=template_of(config, tokenizer))
    print(f"{path}, with {f'the template {chat.template!r}' if chat.template else 'its chat template'}.", flush=True)
    if config.dry_run:
        return print(f"First prompt: {chat.text('Hello')!r}")
    group, log_dir = engine_group(config.vllm, "vllm"), tempfile.mkdtemp(prefix="openrlhf-chat-")
    with (
        ray_cluster(Placement(groups=(group,), on_gpus=kind == "cuda")),
        engines(config, path, tokenizer, kind, name="vllm", log_dir=log_dir) as fleet,
        closing(BackgroundLoop()) as loop,
        suppress(EOFError),
    ):
        print("/reset begins anew, /exit ends, Ctrl-C stops an answer.", flush=True)
        while (message := input("> " if sys.stdin.isatty() else "").strip()) not in ("/exit", "exit"):
            if message in ("/reset", "clear"):
                chat.turns.clear()
            elif message:
                chat.answer(message, fleet, loop)


def template_of(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text around a message, or None for the chat template: as the flags say, else as the model was trained."""
    data, trained = config.data, recorded(tokenizer)
    if data.apply_chat_template:
        require_chat_template(tokenizer)
        return None
    unknown = None if tokenizer.chat_template else PLAIN
    return data.input_template or (trained and trained.input_template) or unknown


@dataclass(kw_only=True)
class Chat:
    """A conversation. Without a `template`, the tokenizer's chat template renders it."""

    config: ChatConfig
    tokenizer: PreTrainedTokenizerBase
    template: str | None
    turns: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # a message and its answer each

    def __post_init__(self) -> None:
        file = self.config.preamble
        preamble = Path(file).expanduser().read_text(encoding="utf-8").strip() if file else ""
        self.before = "\n".join(filter(None, (self.config.system, preamble)))

    def text(self, message: str) -> str:
        """Everything that has been said, and a new message, as the model reads it."""
        turns, suffix = [*self.turns, (message, "")], self.config.csft.suffix
        if self.template is not None:
            said = [fill_template(self.template, asked) + answer for asked, answer in turns]
            return "\n".join(filter(None, (self.before, *said))) + suffix
        messages: list[Message] = [{"role": "system", "content": self.before}] if self.before else []
        for asked, answer in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return render(self.tokenizer, messages[:-1], add_generation_prompt=True) + suffix

    def answer(self, message: str, fleet: Fleet, loop: BackgroundLoop) -> None:
        """Print the answer to a message while it is sampled, and remember both. Ctrl-C ends the answer."""
        spec, tokenizer = settings.inference_sampling(self.config, samples=1), self.tokenizer
        while len(tokens := encode(tokenizer, [self.text(message)])[0].tokens) > spec.prompt_room and self.turns:
            del self.turns[0]
            print("[notice] The oldest turn no longer fits into --data.max_len and is forgotten.")
        tokens = spec.clip_prompt(tokens)
        [params] = spec.params_for(Prompt(index=len(self.turns), text=message, tokens=tokens), len(tokens))
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
        self.turns.append((message, printed))
