"""Everything that changes while a batch is generated, as one pytree."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float32, Int

from dsv3_jax.kv_cache import LatentKVCache

RUNNING, STOPPED, FULL = 0, 1, 2  # values of DecodeState.finished


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of B rows with room for S tokens each. Donated to every dispatch and returned.

    The cache holds a row's tokens except its last: a decode step feeds that one and appends one.
    """

    cache: LatentKVCache

    tokens: Int[Array, "B S"]
    """Prompt and generated tokens; undefined past ``lengths``. Written by the decode loop."""

    lengths: Int[Array, " B"]
    """Known tokens a row, at least 1."""

    limits: Int[Array, " B"]
    """Length at which a row is full. Set by the Generator."""

    finished: Int[Array, " B"]
    """RUNNING, STOPPED (a stop token or stop string) or FULL. A finished row no longer changes.
    Written by the decode loop, and by the Generator when a stop string appears."""

    logprobs: Float32[Array, "B S"]
    """log softmax(logits)[token] of each generated token, before temperature and filters."""

    top_tokens: Int[Array, "B S n"]
    """The n most probable tokens at each generated place, best first; n may be 0."""

    top_logprobs: Float32[Array, "B S n"]

    steps: Int[Array, ""]
    """Decode steps since the state was made."""
