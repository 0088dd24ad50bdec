"""`openrlhf VERB …`: the same programs as `python -m openrlhf.cli.…`, under shorter names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from openrlhf import __version__

VERBS = {
    "sft": ("train_sft", "supervised fine-tuning"),
    "rm": ("train_rm", "reward model from preference pairs"),
    "ppo": ("train_ppo_ray", "reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb's command (`sft`, or `train_sft`) with the remaining arguments. Without one, or with --help, list the verbs."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help"):
        print("usage: openrlhf VERB [--flag VALUE ...]      openrlhf VERB --help lists its flags\n")
        print("\n".join(f"  {name:6} {what}" for name, (_, what) in VERBS.items()))
        return
    if verb == "--version":
        print(f"openrlhf {__version__}")
        return
    verb = next((short for short, (command, _) in VERBS.items() if command == verb), verb)
    if verb not in VERBS:
        close = get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        print(f"error: there is no verb {verb}; known are {', '.join(VERBS)}.{hint}", file=sys.stderr)
        raise SystemExit(2)
    import_module(f"openrlhf.cli.{VERBS[verb][0]}").main(arguments[1:])


if __name__ == "__main__":
    main()
