"""From logits to the next token, with settings that may differ from row to row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Key, Shaped, UInt32

# What a random number is for: the purposes at one position must not share theirs.
NEXT, DRAFT, ACCEPT = range(3)

# Higher temperatures sample alike. Their reciprocals are subnormal, which devices take for zero,
# and zero times the -inf of a token that is out is NaN.
_HOTTEST = 2.0**125


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

    @classmethod
    def greedy(cls, rows: int) -> Sampling:
        """That never stops at a token. Every row has its own seed."""
        columns = {name: np.zeros(rows) for name in ("temperature", "top_k", "top_p", "min_p")}
        return cls.pack(stop_tokens=np.full((rows, 1), -1), seed=np.arange(rows), **columns)

    @property
    def any_drawn(self) -> Bool[Array, ""]:
        """Whether any row draws its tokens. Sorting a whole vocabulary costs more than the rest of
        sampling, so that a greedy batch is worth a branch."""
        return jnp.any(self.temperature > 0.0)


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

    def in_order_of_ids(order: jax.Array, keep: jax.Array) -> jax.Array:
        return jnp.zeros(keep.shape, bool).at[order].set(keep, unique_indices=True)

    # Not .at[rows, order]: on a mesh XLA may send the indices of all rows to all devices.
    return jax.vmap(in_order_of_ids)(order, keep)


def filtered(
    logits: Float32[Array, "B *places W"], sampling: Sampling
) -> Float32[Array, "B *places W"]:
    """Log-probabilities, up to a constant a row, of the distribution that tokens are drawn from.

    After temperature, top_k, top_p and min_p; -inf for tokens that are out. At temperature 0 all
    but the most probable token is out. Several places of a row share its settings.
    """
    B, *places, W = logits.shape
    count = int(np.prod(places))
    settings = jax.tree.map(lambda column: jnp.repeat(column, count, axis=0), sampling)
    rows = logits.reshape(B * count, W)
    cold = (settings.temperature < jnp.finfo(jnp.float32).tiny)[:, None]
    # Relative to the best, so that no temperature turns several logits into +inf.
    relative = rows - jnp.max(rows, axis=-1, keepdims=True)
    temperature = jnp.minimum(settings.temperature, _HOTTEST)[:, None]
    scaled = relative / jnp.where(cold, 1.0, temperature)
    best = jnp.arange(W) == jnp.argmax(rows, axis=-1)[:, None]
    keep = jnp.where(cold, best, kept(scaled, settings))
    return jnp.where(keep, scaled, -jnp.inf).reshape(logits.shape)


def noise(
    draw: Callable[[Key[Array, ""]], jax.Array],
    sampling: Sampling,
    positions: Int[Array, " B"],
    purpose: int,
) -> Shaped[Array, "B ..."]:
    """``draw`` of one key a row, made of the row's own seed, the position it fills and the purpose.

    So a request gives the same tokens alone or in any batch. A position may be tried more than
    once, when drafts are taken back: what was tried and dropped said nothing of what was kept.
    """

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return draw(key if purpose == NEXT else jax.random.fold_in(key, purpose))

    return jax.vmap(one)(sampling.seed, positions)


def pick(
    log_probabilities: Float32[Array, "B W"],
    sampling: Sampling,
    positions: Int[Array, " B"],
    purpose: int,
) -> Int[Array, " B"]:
    """Draws from unnormalised log-probabilities: the largest after adding Gumbel noise."""
    shape = log_probabilities.shape[1:]
    gumbel = noise(
        lambda key: jax.random.gumbel(key, shape, jnp.float32), sampling, positions, purpose
    )
    return jnp.argmax(log_probabilities + gumbel, axis=-1).astype(jnp.int32)


def sample(
    logits: Float32[Array, "B W"],
    sampling: Sampling,
    positions: Int[Array, " B"],
    purpose: int = NEXT,
) -> Int[Array, " B"]:
    """The token at ``positions`` of every row, greedy or drawn."""
    return jax.lax.cond(
        sampling.any_drawn,
        lambda: pick(filtered(logits, sampling), sampling, positions, purpose),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )
