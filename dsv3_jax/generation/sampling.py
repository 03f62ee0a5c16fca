"""Sampling of the next token from logits. Every sequence of a batch has its own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Key, Shaped, UInt32

# Purposes of random numbers. Those of one position must be independent of each other.
NEXT, DRAFT, ACCEPT = range(3)

# Higher temperatures give the same distribution. Their reciprocals are subnormal, which devices
# flush to zero, and zero times the -inf of an excluded token is NaN.
_MAX_TEMPERATURE = 2.0**125

_T = TypeVar("_T")

SamplingMode = Literal["greedy", "unfiltered", "sampled"]
"""``greedy``: every temperature is 0. ``unfiltered``: some may be higher, but sequences whose
temperature is not 0 have no top_k, top_p or min_p. ``sampled``: anything."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of B sequences. Written at admission, read by every step."""

    temperature: Float32[Array, " B"]
    """0 selects the most probable token."""
    top_k: Int[Array, " B"]
    """Number of most probable tokens to keep; 0 keeps all."""
    top_p: Float32[Array, " B"]
    """Keep the fewest most probable tokens whose probabilities sum to at least this."""
    min_p: Float32[Array, " B"]
    """Keep tokens of at least this probability relative to the most probable one."""
    seed: UInt32[Array, " B"]
    stop_tokens: Int[Array, "B n_stop"]
    """Token ids that end the sequence, padded with -1."""
    mode: SamplingMode | None = dataclasses.field(default=None, metadata={"static": True})
    """The mode, where the caller knows it when it compiles. None reads the temperatures instead and
    branches, for which XLA makes a GPU's host wait until they are known."""

    def choose(self, sampled: Callable[[], _T], greedy: Callable[[], _T]) -> _T:
        """Returns ``greedy()`` if all temperatures are 0, else ``sampled()``, which must be right
        for any temperatures. Sorting a whole vocabulary costs more than the rest of sampling, so
        greedy and unfiltered batches skip it."""
        if self.mode is None:
            return jax.lax.cond(jnp.any(self.temperature > 0.0), sampled, greedy)
        return greedy() if self.mode == "greedy" else sampled()


def filter_mask(logits: Float32[Array, "B W"], sampling: Sampling) -> Bool[Array, "B W"]:
    """Returns the mask of tokens that pass top_k, top_p and min_p, applied in that order, as
    transformers applies them, to logits divided by the temperature. The most probable token always
    passes. Among equal logits, lower ids rank first."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    negated, order = jax.lax.sort((-logits, ids), num_keys=1, is_stable=True)
    ranked, rank = -negated, jnp.arange(logits.shape[-1])
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
    keep = rank < top_k[:, None]
    probabilities = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # top_p = 1 keeps all tokens, even if rounding makes the sum reach 1 early.
    keep &= (before < sampling.top_p[:, None]) | (sampling.top_p >= 1.0)[:, None]
    keep &= probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    keep |= rank == 0

    def scatter_to_ids(order: jax.Array, keep: jax.Array) -> jax.Array:
        return jnp.zeros(keep.shape, bool).at[order].set(keep, unique_indices=True)

    # Not .at[sequences, order]: on a mesh XLA may send the indices of all sequences to all devices.
    return jax.vmap(scatter_to_ids)(order, keep)


def filter_logits(
    logits: Float32[Array, "B *positions W"], sampling: Sampling
) -> Float32[Array, "B *positions W"]:
    """Applies temperature, top_k, top_p and min_p to logits.

    The result is the log-probability of each token, up to a constant per position, in the
    distribution that tokens are sampled from. It is -inf for excluded tokens. At temperature 0 all
    tokens but the most probable one are excluded. All positions of a sequence share its settings.
    """
    B, *positions, W = logits.shape
    count = int(np.prod(positions))
    settings = jax.tree.map(lambda column: jnp.repeat(column, count, axis=0), sampling)
    flat = logits.reshape(B * count, W)
    is_greedy = (settings.temperature < jnp.finfo(jnp.float32).tiny)[:, None]
    # Relative to the maximum, so that no temperature makes several logits +inf. With this sign,
    # because they are sorted by it: on a GPU, negating them would be one more kernel.
    below = jnp.max(flat, axis=-1, keepdims=True) - flat
    temperature = jnp.minimum(settings.temperature, _MAX_TEMPERATURE)[:, None]
    scaled = -(below / jnp.where(is_greedy, 1.0, temperature))
    is_best = jnp.arange(W) == jnp.argmax(flat, axis=-1)[:, None]
    passes = True if sampling.mode == "unfiltered" else filter_mask(scaled, settings)
    keep = jnp.where(is_greedy, is_best, passes)
    return jnp.where(keep, scaled, -jnp.inf).reshape(logits.shape)


def random_values(
    generate: Callable[[Key[Array, ""]], jax.Array],
    sampling: Sampling,
    positions: Int[Array, " B"],
    purpose: int,
) -> Shaped[Array, "B ..."]:
    """Calls ``generate`` with one random key per sequence and returns the stacked results.

    The key is a function of the sequence's seed, the position of the token, and the purpose. A
    request therefore gets the same tokens alone or in any batch. After a rejected draft, the later
    positions are sampled again with the same keys. That keeps the distribution: no accepted token
    depends on the discarded values.
    """

    def generate_one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return generate(key if purpose == NEXT else jax.random.fold_in(key, purpose))

    return jax.vmap(generate_one)(sampling.seed, positions)


def sample_filtered(
    logits: Float32[Array, "B W"],
    sampling: Sampling,
    positions: Int[Array, " B"],
    purpose: int,
) -> Int[Array, " B"]:
    """Samples from softmax(logits) by the Gumbel-max trick: argmax(logits + Gumbel noise). The
    logits are those of :func:`filter_logits`; of ``sampling`` only the seeds are read."""
    shape = logits.shape[1:]
    gumbel = random_values(
        lambda key: jax.random.gumbel(key, shape, jnp.float32), sampling, positions, purpose
    )
    return jnp.argmax(logits + gumbel, axis=-1).astype(jnp.int32)


def sample(
    logits: Float32[Array, "B W"],
    sampling: Sampling,
    positions: Int[Array, " B"],
    purpose: int = NEXT,
) -> tuple[Int[Array, " B"], Float32[Array, "B W"]]:
    """Returns each sequence's token at ``positions``, greedy or sampled by its settings, and the
    result of :func:`filter_logits`. If all sequences are greedy, that is ``logits`` instead."""

    def sampled() -> tuple[jax.Array, jax.Array]:
        filtered = filter_logits(logits, sampling)
        return sample_filtered(filtered, sampling, positions, purpose), filtered

    return sampling.choose(sampled, lambda: (jnp.argmax(logits, axis=-1).astype(jnp.int32), logits))


def mask_vocab_padding(
    logits: Float32[Array, "*batch W"], vocab_size: int
) -> Float32[Array, "*batch W"]:
    """Sets the logits of ids from ``vocab_size`` on to -inf. An embedding may be padded: it has
    more rows than the tokenizer has tokens."""
    W = logits.shape[-1]
    return logits if vocab_size >= W else jnp.where(jnp.arange(W) < vocab_size, logits, -jnp.inf)
