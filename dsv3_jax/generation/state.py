"""Everything that changes while a batch is generated, as one pytree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.kv_cache import LatentKVCache

RUNNING, STOPPED, FULL, NOT_FINITE = range(4)  # values of DecodeState.finished


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of B rows with room for S tokens each. Donated to every dispatch and returned.

    The cache holds a row's tokens except its last: a decode step feeds that one, and the drafts
    behind it, and appends at least one. K is the largest number of drafts a step, 0 without
    speculation.
    """

    cache: LatentKVCache

    tokens: Int[Array, "B S"]
    """Prompt and generated tokens; undefined past ``lengths``. Written by the decode loop."""

    lengths: Int[Array, " B"]
    """Known tokens a row, at least 1."""

    limits: Int[Array, " B"]
    """Length at which a row is full. Set by the Generator."""

    finished: Int[Array, " B"]
    """RUNNING, STOPPED (a stop token or stop string), FULL, or NOT_FINITE (the logits behind the
    last token hold NaN or an infinity). A finished row no longer changes.
    Written by the decode loop, and by the Generator when a stop string appears."""

    logprobs: Float32[Array, "B S"]
    """log softmax(logits)[token] of each generated token, before temperature and filters."""

    top_tokens: Int[Array, "B S n"]
    """The n most probable tokens at each generated place, best first; n may be 0."""

    top_logprobs: Float32[Array, "B S n"]

    hidden: Float[Array, "B F D"]
    """What the MTP layer is to take next: hidden states of the row's newest cached tokens. F is
    K + 1 where the MTP layer drafts, else 0."""

    pending: Int[Array, " B"]
    """How many of them a row has; the MTP layer's cache holds ``cache.lengths - pending`` places.
    Written with ``hidden`` by prefill and by each decode step."""

    drafted: Int[Array, "B K"]
    """Drafts offered to the model so far, by their place in a step's draft."""

    accepted: Int[Array, "B K"]
    """Those of them that became tokens of the row."""

    row_steps: Int[Array, " B"]
    """Decode steps in which the row was running."""

    steps: Int[Array, ""]
    """Decode steps since the state was made."""

    @classmethod
    def empty(
        cls,
        cache: LatentKVCache,
        max_len: int,
        *,
        depth: int,
        feed: tuple[int, int],
        dtype: DTypeLike,
        top: int,
    ) -> DecodeState:
        """Nothing known of any row: K is ``depth``, (F, D) are ``feed``, n is ``top``."""
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
            top_tokens=zeros(max_len, top),
            top_logprobs=jnp.zeros((B, max_len, top), jnp.float32),
            hidden=jnp.zeros((B, *feed), dtype),
            pending=zeros(),
            drafted=zeros(depth),
            accepted=zeros(depth),
            row_steps=zeros(),
            steps=jnp.int32(0),
        )
