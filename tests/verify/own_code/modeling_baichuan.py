"""A model like Baichuan, in which one weight, `W_pack`, produces queries, keys and values.

The model was written for the tests and supports the current version of Transformers.
"""

from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_baichuan import BaichuanConfig


class PackedAttention(LlamaAttention):
    """Attention that uses one weight for queries, keys and values."""

    def __init__(self, config: BaichuanConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.q_proj, self.k_proj, self.v_proj
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = hidden_states.shape[:-1]
        parts = self.W_pack(hidden_states).chunk(3, -1)
        queries, keys, values = (
            part.view(*rows, -1, self.head_dim).transpose(1, 2) for part in parts
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        mixed, weights = attend(
            self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(mixed.reshape(*rows, -1).contiguous()), weights


class BaichuanModel(LlamaModel):
    """A Llama decoder with `PackedAttention`."""

    config_class = BaichuanConfig

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = PackedAttention(config, number)
        self.post_init()


class BaichuanForCausalLM(LlamaForCausalLM):
    """A `BaichuanModel` with an output layer."""

    config_class = BaichuanConfig

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        self.post_init()
