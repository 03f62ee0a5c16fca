"""Results of a forward pass besides its logits."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import MTPHidden
from dsv3_jax.layers.moe import RoutingStats


class Hidden(NamedTuple):
    """Hidden states [B, T, D] after the last decoder layer, or after an MTP layer."""

    pre_norm: Float[Array, "B T D"]
    """Output of the layer."""
    post_norm: Float[Array, "B T D"]
    """Output of the norm before the LM head: the head's input."""

    def mtp_input(self, which: MTPHidden) -> Float[Array, "B T D"]:
        """Returns the hidden states that an MTP layer takes as input."""
        return self.post_norm if which == "post_norm" else self.pre_norm


class Aux(NamedTuple):
    """Results of a forward pass besides its logits."""

    routing_counts: Int[Array, "L_moe E"]
    """Number of tokens that chose each expert, in each MoE layer of the main model."""
    mtp_logits: tuple[Float32[Array, "B T_k W"], ...]
    """One array per MTP layer, or per application of the first one: entry k is [B, T-1-k, W], and
    position i predicts token i+2+k."""
    routing: tuple[RoutingStats, ...]
    """Counts and scores per MoE layer: the main model's layers, then the MTP layers."""
