"""A switch to rehearse the GPU checks on a CPU with small models."""

import os

REHEARSAL = os.environ.get("OPENRLHF_REHEARSE_GPU") == "1"
