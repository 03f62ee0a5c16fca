"""Online softmax (Milakov and Gimelshein, 2018) for TPU kernels that read the keys in chunks.

For each query row the state is the largest score so far, the sum of exponentials relative to it,
and the sum of the values weighted by them, in float32. A chunk with scores S and values V updates
it by::

    top' = max(top, rowmax S)       P = exp(S - top')       decay = exp(top - top')
    total' = decay total + rowsum P     acc' = decay acc + P V
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.tpu import dot, tiled_bytes


class OnlineSoftmax(NamedTuple):
    """The state of a tile of query rows, in VMEM. All fields are float32 references."""

    top: Any
    """Largest score of each row, [rows, 1]."""
    total: Any
    """Sum of the exponentials of each row, [rows, 1]."""
    acc: Any
    """Weighted sum of the values, [rows, V]."""

    @staticmethod
    def scratch(rows: int, columns: int) -> list[Any]:
        """Returns the scratch types of the three fields, where ``columns`` is V."""
        return [pltpu.VMEM((rows, n), jnp.float32) for n in (1, 1, columns)]

    def clear(self) -> None:
        """Initialises the state for no keys."""
        self.top[...] = jnp.full_like(self.top, -jnp.inf)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def add(self, scores: Float32[Array, "rows S"], values: Float[Array, "S V"]) -> None:
        """Adds a chunk of keys. The score of a masked key is -inf, and its value must be finite."""
        top = jnp.maximum(self.top[...], jnp.max(scores, axis=1, keepdims=True))
        # Without this, rows that have seen no key would compute exp(-inf - -inf), which is NaN.
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        weights, decay = jnp.exp(scores - finite), jnp.exp(self.top[...] - finite)
        self.top[...] = top
        self.total[...] = decay * self.total[...] + jnp.sum(weights, axis=1, keepdims=True)
        self.acc[...] = decay * self.acc[...] + dot(weights.astype(values.dtype), values)

    def result(self) -> tuple[Float32[Array, "rows V"], Float32[Array, "1 rows"]]:
        """Returns the attention and its log-sum-exp. A row without keys has zeros and -inf."""
        total = self.total[...]
        out = self.acc[...] / jnp.where(total == 0.0, 1.0, total)
        return out, (self.top[...] + jnp.log(total)).reshape(1, -1)


def softmax_bytes(rows: int, columns: int, chunk: int, width: int) -> dict[str, int]:
    """Returns bytes of VMEM, by name, of the state and of one chunk's scores.

    Args:
      rows: query rows.
      columns: V, the width of a value.
      chunk: keys per chunk.
      width: largest width of a key or value.
    """
    f32 = jnp.float32
    return {
        "sums": tiled_bytes((rows, columns), f32) + 2 * tiled_bytes((rows, 1), f32),
        # Scores, weights, and operands of the matrix unit: float32 is passed as three bfloat16.
        "scores": 4 * tiled_bytes((rows, chunk), f32) + 2 * tiled_bytes((chunk, width), f32),
    }
