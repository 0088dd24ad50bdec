"""The weights of a model as its files store them, read one tensor at a time."""

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
    """Call `receive(name, tensor)` for each weight in the files of `hf`, in the precision of the
    files.

    Names and shapes are those of the model in memory: Transformers' own loader renames, stacks and
    splits the stored tensors. It fills a model on the meta device, so only the tensor that
    `receive` gets is in memory. The files are read again; of a weight that `receive` ignores, only
    the header is read.
    """
    config: Any = copy.deepcopy(hf.config)
    if hasattr(
        config, "quantization_config"
    ):  # quantized while it was loaded; the files have plain weights
        del config.quantization_config
    with _handing_over_to(receive):
        type(hf).from_pretrained(hf.name_or_path, config=config, ignore_mismatched_sizes=True)


@contextmanager
def _handing_over_to(receive: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Have Transformers' loader pass stored tensors to `receive`, not to a model, silently, until
    the block exits.
    """

    def read_later(pool: object, stored: Any, *_: object, **__: object) -> Callable[[], Tensor]:
        return lambda: stored[...]  # not cast to the model's data type

    def hand_over(model: object, name: str, tensor: Tensor, found: Any, quantizer: object) -> None:
        found.missing_keys.discard(name)
        receive(name, tensor)

    level = transformers_logging.get_verbosity()
    with ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(devices=[])
        )  # weights that the files lack are drawn
        stack.enter_context(torch.no_grad())
        stack.enter_context(patch(f"{LOADER}.spawn_materialize", read_later))
        stack.enter_context(patch(f"{LOADER}.set_param_for_module", hand_over))
        stack.callback(transformers_logging.set_verbosity, level)
        transformers_logging.set_verbosity_error()
        yield
