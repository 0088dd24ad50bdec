"""OpenRLHF: supervised, preference and reinforcement learning of language models on Ray, vLLM,
DeepSpeed and Transformers.
"""

import logging

# Where it is installed, Transformers and PEFT import it, and it warns of a kernel that is not used
# here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.13.0"
