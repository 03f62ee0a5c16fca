"""Everything that changes while a batch is generated, as one pytree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.kv_cache import LatentKVCache

RUNNING, STOPPED, FULL, NON_FINITE = range(4)  # values of DecodeState.finished


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State of B sequences with at most S tokens each. Every dispatch donates and returns it.

    The cache contains all tokens of a sequence except the last. A decode step runs the last token
    together with its drafts, and appends at least one token. K is the maximum number of drafts per
    step; it is 0 without speculation.
    """

    cache: LatentKVCache

    tokens: Int[Array, "B S"]
    """Prompt and generated tokens; undefined past ``lengths``. Written by the decode loop."""

    lengths: Int[Array, " B"]
    """Number of prompt and generated tokens, at least 1. Written by the decode loop."""

    limits: Int[Array, " B"]
    """Length at which a sequence is full. Set by the Generator."""

    finished: Int[Array, " B"]
    """RUNNING, STOPPED (a stop token or stop string), FULL, or NON_FINITE (the logits after the
    last token contain NaN or an infinity). A finished sequence no longer changes. Written by the
    decode loop, and by the Generator when a stop string appears."""

    logprobs: Float32[Array, "B S"]
    """log softmax(logits)[token] of each generated token, before temperature and filters. Written
    by the decode loop."""

    top_tokens: Int[Array, "B S n"]
    """The n most probable tokens at the position of each generated token, best first. n may be 0.
    Written by the decode loop."""

    top_logprobs: Float32[Array, "B S n"]
    """Log-probabilities of ``top_tokens``. Written by the decode loop."""

    mtp_inputs: Float[Array, "B F D"]
    """Hidden states of each sequence's newest cached tokens: the inputs that the MTP layer has not
    processed yet. F is K + 1 if the MTP layer drafts, else 0. Written by prefill and by each decode
    step."""

    num_mtp_inputs: Int[Array, " B"]
    """Number of valid ``mtp_inputs``. The MTP layer's cache contains ``cache.lengths -
    num_mtp_inputs`` positions. Written together with ``mtp_inputs``."""

    drafted: Int[Array, "B K"]
    """Number of drafts that the model has checked, by position in the step's draft."""

    accepted: Int[Array, "B K"]
    """Number of drafts that became tokens of the sequence, by position in the step's draft."""

    sequence_steps: Int[Array, " B"]
    """Number of decode steps in which the sequence was running."""

    steps: Int[Array, ""]
    """Number of decode steps since the state was created."""

    @classmethod
    def empty(
        cls,
        cache: LatentKVCache,
        max_len: int,
        *,
        depth: int,
        num_mtp_inputs: int,
        hidden_size: int,
        dtype: DTypeLike,
        num_top_logprobs: int,
    ) -> DecodeState:
        """Returns the state of sequences without tokens, all of them RUNNING.

        Args:
          max_len: S.
          depth: K.
          num_mtp_inputs: F.
          hidden_size: D.
          dtype: dtype of ``mtp_inputs``, which is the model's.
          num_top_logprobs: n.
        """
        B = cache.lengths.shape[0]

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((B, *shape), jnp.int32)

        return cls(
            cache=cache,
            tokens=zeros(max_len),
            lengths=zeros(),
            limits=zeros(),
            finished=zeros(),
            logprobs=jnp.zeros((B, max_len), jnp.float32),
            top_tokens=zeros(max_len, num_top_logprobs),
            top_logprobs=jnp.zeros((B, max_len, num_top_logprobs), jnp.float32),
            mtp_inputs=jnp.zeros((B, num_mtp_inputs, hidden_size), dtype),
            num_mtp_inputs=zeros(),
            drafted=zeros(depth),
            accepted=zeros(depth),
            sequence_steps=zeros(),
            steps=jnp.int32(0),
        )
