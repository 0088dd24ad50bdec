"""OpenRLHF: supervised, preference and reinforcement learning for language models.

Built on Ray, vLLM, DeepSpeed and Transformers.
"""

import logging

# When imported, bitsandbytes warns about a kernel that is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.13.0"
