"""Whether the checks of a GPU are rehearsed on a CPU, with small models."""

import os

REHEARSAL = os.environ.get("OPENRLHF_REHEARSE_GPU") == "1"
