"""OpenRLHF: supervised, preference and reinforcement learning for language models.

Built on Ray, vLLM, DeepSpeed and Transformers.
"""

import logging

# If bitsandbytes is installed, Transformers and PEFT import it, and it warns about a kernel that is
# not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.13.0"
