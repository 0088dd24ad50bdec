"""One thin module per command: flags in, the stage's `run` called."""

import signal
import sys
from importlib.util import find_spec

from openrlhf.termination import end_quietly

# The modules of a command are imported next, unless this package is a library of another program.
program = sys.argv[0] if sys.argv else ""
is_command = program == "-m" or program.endswith("/openrlhf")
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_quietly)

# `python -m openrlhf.cli.COMMAND` imports this package first. If COMMAND is missing, Python only says "No module named".
if sys.argv[:1] == ["-m"]:
    module = next((word for word in sys.orig_argv if word.startswith(f"{__name__}.")), __name__)
    if find_spec(module) is None:
        from openrlhf.cli import main

        main.main([module.rpartition(".")[2]])  # says which verbs there are, and ends
