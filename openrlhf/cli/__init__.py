"""One thin module per command: flags in, the stage's `run` called."""

import sys
from importlib.util import find_spec

# `python -m openrlhf.cli.COMMAND` imports this package first. If COMMAND is missing, Python only says "No module named".
if sys.argv[:1] == ["-m"]:
    module = next((word for word in sys.orig_argv if word.startswith(f"{__name__}.")), __name__)
    if find_spec(module) is None:
        from openrlhf.cli import main

        main.main([module.rpartition(".")[2]])  # says which verbs there are, and ends
