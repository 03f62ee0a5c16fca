"""Inputs and outputs of a model: checks of tokens, and results besides the logits.

Shapes and dtypes of inputs are checked always, and values if they are known. Values are unknown
inside ``jax.jit``. The methods of :class:`~dsv3_jax.model.DeepSeekV3` document what invalid values
do there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import ModelConfig, MTPHidden
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.words import counted


class Hidden(NamedTuple):
    """Hidden states [B, T, D] after the last decoder layer, or after an MTP layer."""

    pre_norm: Float[Array, "B T D"]
    """Output of the layer."""
    post_norm: Float[Array, "B T D"]
    """Output of the norm before the LM head: the head's input."""

    def mtp_input(self, which: MTPHidden) -> Float[Array, "B T D"]:
        """Returns the hidden states that an MTP layer takes as input."""
        return self.post_norm if which == "post_norm" else self.pre_norm


class HiddenStates(NamedTuple):
    """The hidden states of whole sequences that predict their tokens."""

    main: Hidden
    """After the last decoder layer. Position i predicts token i+1."""
    mtp: tuple[Hidden, ...]
    """After each MTP layer, or each application of the first one. In entry k, position i predicts
    token i+2+k, and the last k+1 positions are padding."""
    routing: tuple[RoutingStats, ...]
    """Counts and scores per MoE layer of the main model."""
    mtp_routing: tuple[RoutingStats, ...]
    """The same of each MTP layer, without padding."""


class Aux(NamedTuple):
    """Results of a forward pass besides its logits."""

    routing_counts: Int[Array, "L_moe E"]
    """Number of tokens that chose each expert, in each MoE layer of the main model."""
    mtp_logits: tuple[Float32[Array, "B T_k W"], ...]
    """One array per MTP layer, or per application of the first one: entry k is [B, T-1-k, W], and
    position i predicts token i+2+k."""
    routing: tuple[RoutingStats, ...]
    """Counts and scores per MoE layer: the main model's layers, then the MTP layers. They have no
    padding."""

    @classmethod
    def of(
        cls, states: HiddenStates, mtp_logits: tuple[Float32[Array, "B _ W"], ...], experts: int
    ) -> Aux:
        """Returns the results of a forward pass through layers of ``experts`` experts."""
        counts = [stats.counts for stats in states.routing]
        stacked = jnp.stack(counts) if counts else jnp.zeros((0, experts), jnp.int32)
        return cls(stacked, mtp_logits, states.routing + states.mtp_routing)


def check_tokens(config: ModelConfig, tokens: Any, *, predictions: int = 0) -> None:
    """Raises ValueError unless ``tokens`` [B, T] are token ids of whole sequences. The k-th of
    ``predictions`` MTP layers that run too, or applications of one, predicts T - 1 - k tokens, so
    that each needs one more token."""
    _check_array(tokens)
    T, longest = tokens.shape[1], config.max_position_embeddings
    shortest = 1 + predictions
    if not shortest <= T <= longest:
        layers = f" for {predictions} MTP layers" if shortest > T else ""
        raise ValueError(
            f"tokens: expected {shortest} to {longest} (max_position_embeddings) per"
            f" sequence{layers}, got {T}"
        )
    ids = _known_values(tokens)
    if ids is not None and (ids.min() < 0 or ids.max() >= config.vocab_size):
        wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
        raise ValueError(f"tokens: expected ids from 0 to {config.vocab_size - 1}, got {wrong[0]}")


def check_extension(
    config: ModelConfig, tokens: Any, starts: Any, counts: Any, cache: LatentKVCache
) -> None:
    """Raises ValueError unless ``tokens`` [B, T] can extend the B sequences of the cache, from
    position ``starts`` [B] on. The first ``counts`` [B] of the T tokens of a sequence are valid."""
    _check_array(tokens)
    B = len(cache.block_tables)
    shapes = tokens.shape[:1], np.shape(starts), np.shape(counts)
    if shapes != ((B,),) * 3:
        raise ValueError(
            f"tokens, starts, counts: expected {counted(B, 'sequence')} as the cache has, got"
            f" shapes {tokens.shape}, {shapes[1]} and {shapes[2]}"
        )
    known_starts, known_counts = _known_values(starts), _known_values(counts)
    if known_starts is None or known_counts is None:
        return
    length, limit = int((known_starts + known_counts).max()), cache.max_length(config)
    if length > limit:
        which = "max_position_embeddings" if limit < cache.capacity else "the cache's capacity"
        raise ValueError(
            f"cache: expected sequences of at most {counted(limit, 'token')} ({which}), got"
            f" {length}"
        )


def _check_array(tokens: Any) -> None:
    if not isinstance(tokens, jax.Array | np.ndarray):
        raise ValueError(f"tokens: expected an array [B, T], got {type(tokens).__name__}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected shape [B, T], got {tokens.shape}")
    if 0 in tokens.shape:
        raise ValueError(f"tokens: expected at least one token, got shape {tokens.shape}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens: expected integers, got {tokens.dtype}")


def _known_values(array: Any) -> np.ndarray | None:
    """Copies an array to the host, which waits for the device. Returns None for a tracer, and for
    an array with shards on other processes."""
    if isinstance(array, Tracer) or (
        isinstance(array, jax.Array) and not array.is_fully_addressable
    ):
        return None
    return np.asarray(array)
