"""Softmax attention chunk by chunk of the keys, inside a TPU kernel (Milakov and Gimelshein, 2018).

A query row has the largest score so far, the sum of exponentials against it, and their weighted sum
of the values, in float32::

    top' = max(top, rowmax S)       P = exp(S - top')       keep = exp(top - top')
    total = keep total + rowsum P   acc = keep acc + P V
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.tpu import dot, tiled_bytes


class OnlineSoftmax(NamedTuple):
    """References to VMEM."""

    top: Any
    """[rows, 1]"""
    total: Any
    """[rows, 1]"""
    acc: Any
    """[rows, V]"""

    @staticmethod
    def scratch(rows: int, columns: int) -> list[Any]:
        """What pallas_call allocates for the three."""
        return [pltpu.VMEM((rows, n), jnp.float32) for n in (1, 1, columns)]

    def clear(self) -> None:
        self.top[...] = jnp.full_like(self.top, -jnp.inf)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def add(self, scores: Float32[Array, "rows S"], values: Float[Array, "S V"]) -> None:
        """Some more keys; a masked score is -inf, its value a number."""
        top = jnp.maximum(self.top[...], jnp.max(scores, axis=1, keepdims=True))
        # exp(-inf - -inf) would be NaN where nothing is seen yet.
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        weights, keep = jnp.exp(scores - finite), jnp.exp(self.top[...] - finite)
        self.top[...] = top
        self.total[...] = keep * self.total[...] + jnp.sum(weights, axis=1, keepdims=True)
        self.acc[...] = keep * self.acc[...] + dot(weights.astype(values.dtype), values)

    def result(self) -> tuple[Float32[Array, "rows V"], Float32[Array, "1 rows"]]:
        """Attention and log-sum-exp; zeros and -inf of a row that saw nothing."""
        total = self.total[...]
        out = self.acc[...] / jnp.where(total == 0.0, 1.0, total)
        return out, (self.top[...] + jnp.log(total)).reshape(1, -1)


def softmax_bytes(rows: int, columns: int, chunk: int, width: int) -> dict[str, int]:
    """VMEM that it takes, and the scores of a chunk, whose keys and values are ``width`` wide."""
    f32 = jnp.float32
    return {
        "sums": tiled_bytes((rows, columns), f32) + 2 * tiled_bytes((rows, 1), f32),
        # Scores, weights, and what the matrix units take: float32 goes in as three bfloat16.
        "scores": 4 * tiled_bytes((rows, chunk), f32) + 2 * tiled_bytes((chunk, width), f32),
    }
