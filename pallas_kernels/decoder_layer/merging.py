"""The merge of attention's parts in the feed-forward kernel, as in :mod:`mla_decode.merge_kernel`.

The programs that multiply a head's units of W_UV each merge its row for themselves. This saves a
kernel, and the parts are read from the L2 cache once for each of these programs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decoder_layer.vectors import strided
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.loads import load_with_layout
from pallas_kernels.hopper.math import NO_SCORE
from pallas_kernels.mla_decode.parts import Parts

_LOADS = 8  # parts that a warpgroup loads concurrently


def merge_row(parts: Parts, sequence: int, row: Any, columns: Any, target: Any) -> None:
    """Stores some columns of a row of attention's output, merged, in shared memory.

    A whole warpgroup calls it.

    Args:
      parts: references to the parts in global memory.
      row: the query row.
      columns: a ``pl.ds`` of a multiple of 128 columns.
    """
    (length,) = target.shape
    layout = strided(length)
    first, count = parts.of_sequence(sequence)

    def store(values: Any) -> None:
        target[...] = values.astype(parts.out.dtype).astype(target.dtype)

    @when(count == 0)
    def _() -> None:
        store(load_with_layout(parts.out.at[sequence, row, columns], layout).astype(jnp.float32))

    @when(count > 0)
    def _() -> None:
        def add(i: Any, carry: Any) -> Any:
            """All loads are issued before any is used. Past the last part the last one is loaded
            again and gets weight 0."""
            total, weight, maximum = carry
            numbers = [i * _LOADS + j for j in range(_LOADS)]
            indices = [first + jnp.minimum(n, count - 1) for n in numbers]
            lses = [parts.lse[index, row] for index in indices]
            values = [
                load_with_layout(parts.partials.at[index, row, columns], layout)
                for index in indices
            ]
            raised = functools.reduce(jnp.maximum, lses, maximum)
            rescale = jnp.exp(maximum - raised)
            total, weight = total * rescale, weight * rescale
            for n, lse, value in zip(numbers, lses, values, strict=True):
                factor = jnp.where(n < count, jnp.exp(lse - raised), 0.0)
                total, weight = total + factor * value, weight + factor
            return total, weight, raised

        zeros = plgpu.layout_cast(jnp.zeros((length,), jnp.float32), layout)
        carry = zeros, jnp.float32(0.0), jnp.float32(NO_SCORE)
        rounds = lax.div(count + (_LOADS - 1), jnp.int32(_LOADS))
        total, weight, _ = lax.fori_loop(0, rounds, add, carry)
        store(total / jnp.where(weight == 0.0, 1.0, weight))
