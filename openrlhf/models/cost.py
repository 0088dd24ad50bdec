"""The computing cost of a sequence as a function of its length.

In a decoder with N weights, L layers and d channels per layer (over all heads), a token in a
sequence of n tokens takes 2·N operations for products with weights and 2·L·d·n for causal attention
(Kaplan et al. 2020, table 1, arXiv:2001.08361). A sequence therefore costs 2·n·(N + L·d·n), which
is proportional to n·(A + n) with A = N / (L·d). The costs of weights and attention are twice as
large in the backward pass, and gradient checkpointing adds another forward pass.
"""

from typing import Any

from transformers import PretrainedConfig


def attention_length(config: PretrainedConfig) -> int | None:
    """Return A, the length in tokens at which attention costs as much as the weights' products.

    N counts only the weights that a token uses, including its experts and the output layer. L
    counts only layers with full attention, because sliding windows and linear attention cost the
    same for every token. Returns None if no layer has full attention; the cost is then linear.
    """
    text: Any = config.get_text_config()

    def number(name: str, default: int) -> int:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
        return default  # the setting is missing or differs between layers

    hidden, layers = number("hidden_size", 0), number("num_hidden_layers", 0)
    heads = number("num_attention_heads", 0)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    attending = kinds.count("full_attention")
    if not (hidden and heads and attending):
        return None
    head_size = number("head_dim", hidden // heads)
    key_heads = number("num_key_value_heads", heads)
    attention = 2 * hidden * head_size * (heads + key_heads)  # Q and O, K and V
    experts = number("num_experts_per_tok", 1)
    inner = number("intermediate_size", 4 * hidden)
    if experts > 1:
        inner = number("moe_intermediate_size", inner)
    mlp = 3 * hidden * inner * experts
    weights = layers * (attention + mlp) + hidden * number("vocab_size", 0)
    return max(1, weights // (attending * heads * head_size))
