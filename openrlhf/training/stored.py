"""Reads a model's weights in the precision of its files, one tensor at a time."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

LOADER = "transformers.core_model_loading"


def read_stored_weights(hf: PreTrainedModel, receive: Callable[[str, Tensor], None]) -> None:
    """Call `receive(name, tensor)` for each weight in the files of `hf`, in the files' precision.

    Tensors have the names and shapes of the model in memory, because the Transformers loader
    renames, stacks and splits the stored tensors. The loader fills a model on the meta device, so
    only the tensor passed to `receive` takes up memory. The files are read again, but only the
    header is read for a weight ignored by `receive`.
    """
    config: Any = copy.deepcopy(hf.config)
    if hasattr(config, "quantization_config"):
        # The model was quantized on loading; the files have unquantized weights.
        del config.quantization_config
    with _loading_into(receive):
        type(hf).from_pretrained(hf.name_or_path, config=config, ignore_mismatched_sizes=True)


@contextmanager
def _loading_into(receive: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Pass the tensors from the Transformers loader to `receive` until the block exits."""

    def read_later(pool: object, stored: Any, *_: object, **__: object) -> Callable[[], Tensor]:
        return lambda: stored[...]  # keep the stored data type

    def pass_on(model: object, name: str, tensor: Tensor, found: Any, quantizer: object) -> None:
        found.missing_keys.discard(name)
        receive(name, tensor)

    level = transformers_logging.get_verbosity()
    with ExitStack() as stack:
        # The loader randomly initializes weights that are missing from the files.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(patch(f"{LOADER}.spawn_materialize", read_later))
        stack.enter_context(patch(f"{LOADER}.set_param_for_module", pass_on))
        stack.callback(transformers_logging.set_verbosity, level)
        transformers_logging.set_verbosity_error()
        yield
