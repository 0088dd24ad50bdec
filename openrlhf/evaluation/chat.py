"""`openrlhf interactive_chat`: a conversation with a model, whose answers appear as they are sampled."""

import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.config.inference import ChatConfig
from openrlhf.data.first_look import recorded
from openrlhf.data.templates import encode, fill_template, render
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
PLAIN = "User: {}\nAssistant: "  # if a model says nothing of its format


@dataclass(kw_only=True)
class Conversation:
    """What has been said, as text for the model. `template` is None if the tokenizer's chat template is used."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    preamble: str
    system: str
    csft: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # message and answer

    def prompt(self, message: str, room: int) -> tuple[list[int], int]:
        """The tokens before the answer to a message, and how many turns were forgotten so that they fit into `room` tokens."""
        forgotten = 0
        while len(tokens := encode(self.tokenizer, [self._text(message)])[0].tokens) > room and self.turns:
            del self.turns[0]
            forgotten += 1
        return tokens, forgotten

    def _text(self, message: str) -> str:
        if self.template is None:
            system = "\n".join(filter(None, (self.system, self.preamble)))
            said = [{"role": "system", "content": system}] if system else []
            for asked, answer in self.turns:
                said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            said.append({"role": "user", "content": message})
            return render(self.tokenizer, said, add_generation_prompt=True) + self.csft
        said = [fill_template(self.template, asked) + answer for asked, answer in self.turns]
        parts = filter(None, (self.system, self.preamble, *said, fill_template(self.template, message)))
        return "\n".join(parts) + self.csft


def run_chat(config: ChatConfig) -> None:
    """Read messages from standard input, and answer them until the input ends. Raises DataError or ModelError."""
    check_engine_args(config.vllm.engine_args, kind := engine_device())
    path = str(config.model.model_name_or_path)
    tokenizer = policy_tokenizer(config, path, flag="--model.model_name_or_path")
    template = template_of(config, tokenizer)
    if template is None:
        require_chat_template(tokenizer)
    preamble = Path(config.preamble).expanduser().read_text(encoding="utf-8").strip() if config.preamble else ""
    csft = f" {config.csft.prompt.strip()} " if config.csft.enable else ""
    talk = Conversation(
        tokenizer=tokenizer, template=template, preamble=preamble, system=config.system or "", csft=csft
    )
    shown = "the chat template of the tokenizer" if template is None else f"the template {template!r}"
    if config.dry_run:
        return print(f"{path}, with {shown}. First prompt: {tokenizer.decode(talk.prompt('Hello', 10**9)[0])!r}")
    group, log_dir = engine_group(config.vllm, "vllm"), tempfile.mkdtemp(prefix="openrlhf-chat-")
    with (
        ray_cluster(Placement(groups=(group,), on_gpus=kind == "cuda")),
        engines(config, path, tokenizer, kind, name="vllm", log_dir=log_dir) as fleet,
        closing(BackgroundLoop()) as loop,
    ):
        print(f"{path}, with {shown}. {HELP}")
        converse(config, talk, fleet, loop)


def template_of(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text around a message, or None for the chat template: as the flags say, else as the model was trained."""
    data, trained = config.data, recorded(tokenizer)
    if data.input_template or data.apply_chat_template:
        return data.input_template
    if trained:
        return None if trained.chat_template else trained.input_template or "{}"
    return None if tokenizer.chat_template else PLAIN


def converse(config: ChatConfig, talk: Conversation, fleet: Fleet, loop: BackgroundLoop) -> None:
    """Answer line after line."""
    number = 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        command, _, rest = line.partition(" ")
        if line in ("/exit", "exit"):
            return
        if line in ("/reset", "clear"):
            talk.turns.clear()
        elif command == "/system":
            talk.system = rest.strip()
        elif line.startswith("/"):
            print(HELP)
        elif line:
            answer_line(config, talk, line, number, fleet, loop)
            number += 1


def answer_line(
    config: ChatConfig, talk: Conversation, line: str, number: int, fleet: Fleet, loop: BackgroundLoop
) -> None:
    """Print the answer to a message while it is sampled, and remember both. Ctrl-C ends the answer."""
    spec, tokenizer = settings.inference_sampling(config), talk.tokenizer
    tokens, forgotten = talk.prompt(line, spec.prompt_room)
    if forgotten:
        print(f"[notice] The oldest {forgotten} turn(s) no longer fit into --data.max_len {config.data.max_len}.")
    if len(tokens) > spec.prompt_room:
        print(f"[notice] Only the last {spec.prompt_room} tokens of {len(tokens)} fit into --data.max_len.")
        tokens = spec.clip_prompt(tokens)
    [params] = spec.params_for(Prompt(index=number, text=line, tokens=tokens), len(tokens))
    sampled: list[int] = []
    printed = ""
    try:
        for piece in loop.iterate(fleet.stream(tokens, params), config.train.step_timeout):
            sampled += piece
            text = str(tokenizer.decode(sampled, skip_special_tokens=True))
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character of several tokens is not complete yet
                print(text[len(printed) :], end="", flush=True)
                printed = text
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(flush=True)
    talk.turns.append((line, printed))
