"""From logits to the next token, with settings that may differ from row to row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Shaped, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """One row's settings an entry. Written by the Generator, read by the decode loop."""

    temperature: Float32[Array, " B"]
    """0 takes the most probable token."""
    top_k: Int[Array, " B"]
    """Keep this many tokens; 0 keeps all."""
    top_p: Float32[Array, " B"]
    """Keep the fewest tokens that hold this much probability together."""
    min_p: Float32[Array, " B"]
    """Keep tokens at least this probable, relative to the most probable."""
    seed: UInt32[Array, " B"]
    stop_tokens: Int[Array, "B n_stop"]
    """Token ids that end a row; -1 fills."""

    @classmethod
    def pack(cls, **columns: Shaped[np.ndarray, "B ..."]) -> Sampling:
        """From host arrays, in the dtypes the loop is compiled for."""
        dtypes = {"top_k": np.int32, "stop_tokens": np.int32, "seed": np.uint32}
        return cls(
            **{n: jnp.asarray(c.astype(dtypes.get(n, np.float32))) for n, c in columns.items()}
        )


def kept(logits: Float32[Array, "B W"], sampling: Sampling) -> Bool[Array, "B W"]:
    """Which tokens top_k, top_p and min_p leave, in that order, as transformers applies them.

    ``logits`` are already divided by the temperature. The most probable token always stays; of
    equal ones, lower ids come first.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    keep = rank < top_k[:, None]
    probabilities = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # top_p = 1 keeps all, also where rounding lets the sum reach 1 early.
    keep &= (before < sampling.top_p[:, None]) | (sampling.top_p >= 1.0)[:, None]
    keep &= probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    keep |= rank == 0
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(keep)


def sample(
    logits: Float32[Array, "B W"], sampling: Sampling, positions: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The next token of every row.

    A row's randomness comes from its own seed and the position it fills, so that a request gives
    the same tokens alone or in any batch.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn(_: None) -> jax.Array:
        cold = sampling.temperature < jnp.finfo(jnp.float32).tiny
        # Relative to the best, so that no temperature turns several logits into +inf.
        relative = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = relative / jnp.where(cold, 1.0, sampling.temperature)[:, None]
        masked = jnp.where(kept(scaled, sampling), scaled, -jnp.inf)

        def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

        picks = jnp.argmax(masked + jax.vmap(noise)(sampling.seed, positions), axis=-1)
        return jnp.where(cold, greedy, picks.astype(jnp.int32))

    # Sorting a whole vocabulary costs more than the rest of sampling: skip it for greedy batches.
    return jax.lax.cond(jnp.any(sampling.temperature > 0.0), drawn, lambda _: greedy, None)
