"""One thin module per command: flags in, the stage's `run` called."""

import sys
from importlib.util import find_spec

# `python -m openrlhf.cli.COMMAND` comes by here first; of a command that is not there Python says a bare "No module named".
if sys.argv[:1] == ["-m"]:
    module = next((word for word in sys.orig_argv if word.startswith(f"{__name__}.")), __name__)
    if find_spec(module) is None:
        from openrlhf.cli.main import VERBS

        asked, there = module.rpartition(".")[2], ", ".join(command for command, _ in VERBS.values())
        print(f"error: there is no command {asked} yet; known are {there}.", file=sys.stderr)
        raise SystemExit(2)
