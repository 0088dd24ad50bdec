"""Imports DeepSpeed without warnings. Other modules import DeepSpeed from here."""

import os
import warnings

from openrlhf.training import devices

if devices.device_kind() == "cpu":
    # without this variable, DeepSpeed warns and guesses
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# On import, DeepSpeed probes the linker for libraries, which prints harmless errors.
with devices.silenced_stderr():
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.utils import logger as deepspeed_logger
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

deepspeed_logger.setLevel("ERROR")
# DeepSpeed calls collectives by deprecated names, which prints a warning per gradient bucket.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

# Compiling the shared-memory collectives takes 25 s on a fresh machine.
# For our message sizes, these collectives are no faster.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore[reportAttributeAccessIssue]

__all__ = ["HfDeepSpeedConfig", "OffloadStateTypeEnum", "deepspeed"]
