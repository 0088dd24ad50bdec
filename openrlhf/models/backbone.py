"""Runs a model's decoder on flat tokens, either as a packed row or as a right-padded block."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.algorithms.experts import load_balancing_loss
from openrlhf.core.batches import Layout
from openrlhf.models import packed_attention
from openrlhf.models.head import OutputHead
from openrlhf.models.loading import require_balanced_experts
from openrlhf.models.ring_attention import RingRow
from openrlhf.models.shared_prefixes import SharedPrefixes
from openrlhf.ring import Ring

# The layer types whose attention is in Transformers' registry.
ATTENTION_TYPES = {"full_attention", "sliding_attention"}


class Outputs(NamedTuple):
    """One value or vector per position, plus the load-balancing loss of a mixture of experts.

    The loss is None if it was not requested. The class is a tuple because ZeRO 3 hooks inspect only
    tuples.
    """

    values: Float[Tensor, "K ..."]
    aux_loss: Float[Tensor, ""] | None = None


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The part of a flat batch's last hidden states that this rank has computed."""

    states: Float[Tensor, "n H"]
    num_tokens: int  # N, the number of tokens in the entire batch
    aux_loss: Tensor | None = None  # the load-balancing loss, if it is computed
    ring: Ring | None = None
    # The states' positions in the batch, in ascending order, or None if this rank has all states.
    places: Int[Tensor, " n"] | None = None

    def held(self, places: Int[Tensor, " K"]) -> Int[Tensor, " k"]:
        """Return the elements of `places` whose states are on this rank. `places` must ascend."""
        if self.places is None:
            return places
        return places[torch.isin(places, self.places)]

    def at(self, held: Int[Tensor, " k"]) -> Float[Tensor, "k H"]:
        """Return the states at the positions `held`, all of which must be on this rank."""
        if self.places is None:
            return self.states[held]
        return self.states[torch.searchsorted(self.places, held)]

    def column(
        self, values: Float[Tensor, "n ..."], places: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, "N ..."]:
        """Return a tensor with the values of all ranks at their positions, and 0 elsewhere.

        Without `places`, the values belong to the states' own positions. All ranks of a ring must
        call this method.
        """
        if places is None:
            if self.places is None:
                return values
            places = self.places
        blank = values.new_zeros(self.num_tokens, *values.shape[1:])
        filled = blank.index_put((places,), values)
        if self.ring:
            return self.ring.sum(filled)
        return filled

    def only(self, wanted: Bool[Tensor, " N"]) -> "Decoded":
        """Return the part at the K `wanted` positions, as if these were the entire batch."""
        positions = wanted.nonzero()[:, 0]
        held = self.held(positions)
        places: Tensor | None = None
        if self.places is not None:
            places = torch.searchsorted(positions, held)
        return replace(self, states=self.at(held), num_tokens=len(positions), places=places)


def _document_arguments(offsets: Tensor, attention: str) -> dict[str, Any]:
    """Return a packed row's document boundaries as arguments for the attention function in use."""
    lengths = offsets.diff()
    cumulative = offsets.int()
    if attention == packed_attention.NAME:
        return {"document_lengths": lengths.tolist(), "document_offsets": cumulative}
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


class HeadedModel(nn.Module):
    """A Transformers model whose decoder runs on flat batches, under an output head.

    Exports read the submodule `hf`. With `packing`, all sequences run as one row without padding;
    otherwise, they run as a right-padded block. With `balancing`, the load-balancing loss of a
    mixture of experts is computed during training. Raises ModelError if `balancing` is set for a
    model without experts.
    """

    max_len: int | None = None  # number of tokens in the run's longest sequence, if known
    ring: Ring | None = None  # the ranks that share each packed row

    def __init__(
        self, hf: PreTrainedModel, head: OutputHead, *, packing: bool, balancing: bool
    ) -> None:
        super().__init__()
        if balancing:
            require_balanced_experts(hf)
        self.hf = hf
        self.head = head
        self.packing = packing
        self.balancing = balancing

    @property
    def config(self) -> PretrainedConfig:
        """The Transformers configuration, used by DeepSpeed and exports."""
        return self.hf.config

    def shared_prefixes(
        self, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]
    ) -> SharedPrefixes | None:
        """Return the common prefixes that this model computes once for several sequences.

        Returns None if sequences are padded, if they share too few tokens, or if a non-attention
        layer needs entire sequences.
        """
        config: Any = self.hf.get_decoder().config
        supported = config._attn_implementation in (packed_attention.NAME, packed_attention.FLASH)
        only_attention = set(getattr(config, "layer_types", None) or ()) <= ATTENTION_TYPES
        if self.ring or not (self.packing and supported and only_attention):
            return None
        return SharedPrefixes.of(tokens, offsets)

    def decode(self, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]) -> Decoded:
        """Compute the last hidden states and, if requested, the load-balancing loss.

        No sequence attends to another sequence. The results do not depend on packing, padding or a
        ring.
        """
        decoder: Any = self.hf.get_decoder()
        num_tokens = len(tokens)
        positions = torch.arange(num_tokens, device=tokens.device)
        positions = positions - offsets[:-1].repeat_interleave(offsets.diff())
        arguments: dict[str, Any] = {}
        # Positions of this rank's tokens in the decoder's flat output. They are not a mask, because
        # a CPU would wait for the decoder on a GPU before it knows how many entries a mask selects.
        rows: Tensor | slice = slice(None)
        # positions of this rank's tokens in the batch, if the rank has only a part of the batch
        places: Tensor | None = None
        if self.ring:
            row = RingRow(self.ring, offsets.diff().tolist())
            arguments["ring_row"] = row
            places = row.places(tokens.device)
            rows = (places < num_tokens).nonzero()[:, 0]  # exclude the padding of the row
            places = places[rows]
            block, positions = row.own_part(tokens)[None], row.own_part(positions)[None]
        elif self.packing:
            arguments |= _document_arguments(offsets, decoder.config._attn_implementation)
            shared = self.shared_prefixes(tokens, offsets)
            if shared:
                arguments["shared_prefixes"] = shared
                tokens = tokens[shared.computed]
                positions = positions[shared.computed]
                rows = shared.source  # a shared prefix counts once per sequence
            block, positions = tokens[None], positions[None]
        else:
            layout = Layout.of(offsets)
            block, positions = layout.pad(tokens), layout.pad(positions)
            arguments["attention_mask"] = layout.real.long()
            rows = layout.real.flatten().nonzero()[:, 0]
        balancing = self.balancing and self.training
        if balancing:
            arguments["output_router_logits"] = True
        # With a cache, or any mask, packed documents would attend to each other.
        output = decoder(input_ids=block, position_ids=positions, use_cache=False, **arguments)
        # A model that is split over several devices leaves the states on the last device.
        states = output.last_hidden_state.flatten(0, 1).to(tokens.device)[rows]
        decoded = Decoded(states=states, num_tokens=num_tokens, ring=self.ring, places=places)
        if not balancing:
            return decoded
        routed = [decoded.column(logits[rows]) for logits in output.router_logits]
        top_k = decoder.config.get_text_config().num_experts_per_tok
        return replace(decoded, aux_loss=load_balancing_loss(routed, top_k=top_k))
