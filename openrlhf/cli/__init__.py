"""One module per command: it reads the flags and calls the function that runs the command."""

import signal
import sys
from importlib.util import find_spec

from openrlhf.termination import end_quietly

# `python -m MODULE` imports the packages of MODULE first, with "-m" in place of the program.
program = sys.argv[0] if sys.argv else ""
module = sys.orig_argv[-len(sys.argv) :][0].removeprefix("-m") if program == "-m" else ""
is_ours = f"{module}.".startswith(f"{__name__}.")

# The modules of a command are imported next, unless this package is a library of another program.
is_command = is_ours or program.endswith("/openrlhf")
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_quietly)

# If MODULE is missing, Python only says "No module named".
if is_ours and find_spec(module) is None:
    from openrlhf.cli import main

    main.main([module.rpartition(".")[2]])  # says which verbs there are, and ends
