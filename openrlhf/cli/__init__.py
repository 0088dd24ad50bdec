"""One module per command.

Each module parses the command's flags and calls the function that runs the command.
"""

import signal
import sys
from importlib.util import find_spec

from openrlhf.termination import end_quietly

# `python -m MODULE` imports MODULE's parent packages first, while sys.argv[0] is still "-m".
program = sys.argv[0] if sys.argv else ""
module = sys.orig_argv[-len(sys.argv) :][0].removeprefix("-m") if program == "-m" else ""
is_ours = f"{module}.".startswith(f"{__name__}.")

# Unless another program imports this package as a library, the command's modules are imported next.
is_command = is_ours or program.endswith("/openrlhf")
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_quietly)

# If MODULE does not exist, Python would only print "No module named".
if is_ours and find_spec(module) is None:
    from openrlhf.cli import main

    main.main([module.rpartition(".")[2]])  # prints the available commands and exits
