"""DeepSpeed, imported without warnings. Other modules import DeepSpeed from this one."""

import os
import warnings

from openrlhf.training import devices

if devices.device_kind() == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed guesses, with a warning
# DeepSpeed asks the linker for libraries at import. The linker's errors are harmless.
with devices.silenced_stderr():
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.utils import logger as deepspeed_logger
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

deepspeed_logger.setLevel("ERROR")
# DeepSpeed calls collectives by names that torch has deprecated, once per gradient bucket.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

# Compiling the shared-memory collectives takes 25 s on a fresh machine and gains nothing for our
# message sizes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore[reportAttributeAccessIssue]

__all__ = ["HfDeepSpeedConfig", "OffloadStateTypeEnum", "deepspeed"]
