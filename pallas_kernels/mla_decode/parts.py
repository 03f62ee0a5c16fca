"""Attention's output before the parts of split sequences are merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


class Parts(NamedTuple):
    """Results of a few query rows of each sequence: all heads of its first query, then of the next.

    What a field does not define may be anything, NaN included.
    """

    out: Float[Array, "B rows C"]
    """The results of sequences that are not split. There may be more rows than query rows."""
    partials: Float32[Array, "parts rows C"]
    """The results of the parts: softmax attention to some of a split sequence's tokens."""
    lse: Float32[Array, "parts rows"]
    """Their log-sum-exps, -inf of a query that sees none of a part's tokens."""
    split_sequences: Int[Array, "partitions 4"]
    """See :class:`schedule.Schedule`."""

    def of_sequence(self, b: int) -> tuple[Any, Any]:
        """Returns the first part of sequence b, and the number of its parts, 0 if it is not split.

        A kernel may call it: the fields are then references.
        """
        first, count = jnp.int32(0), jnp.int32(0)
        # A split sequence is in one of the first entries: there is one for each.
        for i in range(min(b + 1, self.split_sequences.shape[0])):
            entry = [self.split_sequences[i, k] for k in range(3)]
            is_own = (entry[0] == b) & (entry[2] > 0)
            first, count = (
                jnp.where(is_own, new, old)
                for new, old in zip(entry[1:], (first, count), strict=True)
            )
        return first, count

    def merged(self) -> Float[Array, "B rows C"]:
        """Returns the output of all sequences, merged in float32 and rounded to ``out``'s dtype."""
        outs = []
        for b, out in enumerate(self.out):
            first, count = self.of_sequence(b)
            number = jnp.arange(len(self.lse))
            is_own = (number >= first) & (number < first + count)
            lse = jnp.where(is_own[:, None], self.lse, -jnp.inf)
            maximum = jnp.max(lse, axis=0)
            weights = jnp.exp(lse - jnp.where(jnp.isfinite(maximum), maximum, 0.0))
            partials = jnp.where(is_own[:, None, None], self.partials, 0.0)
            total, weight = jnp.sum(weights[..., None] * partials, axis=0), jnp.sum(weights, axis=0)
            total = total / jnp.where(weight == 0.0, 1.0, weight)[:, None]
            outs.append(jnp.where(count > 0, total.astype(out.dtype), out))
        return jnp.stack(outs)
