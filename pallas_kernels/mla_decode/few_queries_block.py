"""A key block's softmax and values in the kernels whose matmuls are transposed.

Scores are S^T [64, N], tokens by query rows, and P is stored as [N, 64], the operand of
O^T += V^T P^T. The scored kernel and the one for few query rows share this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.math import LOG2E
from pallas_kernels.hopper.tiles import ACC, WGMMA, spread_columns
from pallas_kernels.hopper.warpgroup import meet, publish
from pallas_kernels.mla_decode import few_queries_registers as registers
from pallas_kernels.mla_decode.float8_cache import LATENT
from pallas_kernels.mla_decode.kernel_parts import SLACK
from pallas_kernels.mla_decode.schedule import BLOCK


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The softmax of a program's query rows. Row m of a sequence is query m // heads."""

    N: int
    """Query rows of the program."""

    queries: int
    heads: int
    scale: float

    max_pages: int
    """Width of the block table."""

    interpret: Any

    first_row: Callable[[], Any] | None = None
    """Returns the program's first query row, which is 0 by default."""

    padded: bool = False
    """Whether query rows may come after the last query's. They must see no token past the end."""

    def masked(self, s: jax.Array, length: Any, block: Any) -> jax.Array:
        """Returns the exponents of a key block's scores: -inf where a row may not attend."""
        s = s * (self.scale * LOG2E)
        token = plgpu.broadcasted_iota(jnp.int32, (BLOCK, self.N), 0, layout=WGMMA)
        visible = length - (self.queries - 1) - block * BLOCK
        if self.queries > 1:
            row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, self.N), 1, layout=WGMMA)
            row = row + self.first_row() if self.first_row else row
            visible = visible + lax.div(row, jnp.int32(self.heads))
        end = self.max_pages * BLOCK
        end = (jnp.minimum(length, end) if self.padded else end) - block * BLOCK
        return jnp.where(token < jnp.minimum(visible, end), s, -jnp.inf)

    def put(self, target: Any, s: jax.Array, maximum: jax.Array) -> jax.Array:
        """Returns P and writes it to ``target``; wgmma may read it after a barrier."""
        p = jnp.exp2(s - spread_columns(maximum, BLOCK))
        gpu = self.interpret is None
        registers.put_transposed(target, p.astype(jnp.bfloat16), gpu=gpu)
        publish(self.interpret)
        return p

    def above(self, p: jax.Array) -> jax.Array:
        """Returns whether the maximum must be raised. It is a barrier of the warpgroup."""
        return registers.any_above(p, 2.0**SLACK, gpu=self.interpret is None)

    def sums(self, p: jax.Array) -> jax.Array:
        """Returns the sums of a thread's exponentials."""
        return registers.reduce_rows(p, "add", gpu=self.interpret is None)

    def raised(
        self, target: Any, s: jax.Array, maximum: jax.Array, scratch: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Writes P relative to a raised maximum. Returns the maximum and :meth:`sums`."""
        gpu = self.interpret is None
        highest = registers.reduce_rows(s, "max", gpu=gpu)
        highest = registers.reduce_threads(highest, "max", scratch, gpu=gpu)
        raised = jnp.where(highest > maximum + SLACK, highest, maximum)
        p = self.put(target, s, raised)
        meet(self.interpret)
        return raised, self.sums(p)


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """Some latent columns of a key block in shared memory."""

    first: int
    """First latent column."""

    tokens: Any
    """bfloat16 [64, columns], or None if there are no latents."""

    release: Callable[[], None] | None = None
    """Releases the columns. It is called when they have been read."""


def add_values(acc: jax.Array, p: Any, values: Sequence[Values], *, gpu: bool) -> jax.Array:
    """Returns O^T + V^T P^T.

    Args:
      acc: O^T [512, N].
      p: P [N, 64] in shared memory.
    """

    def multiply(acc_ref):
        for each in values:
            if each.tokens is not None:
                rows = pl.ds(each.first, each.tokens.shape[1])
                plgpu.wgmma(acc_ref.at[rows], each.tokens.T, p.T)
        if not gpu:
            return acc_ref[...]
        pending = sum(each.tokens is not None for each in values)
        for each in values:
            pending -= each.tokens is not None
            if each.release is not None:
                if each.tokens is not None:
                    plgpu.wgmma_wait(pending)
                each.release()
        return None

    if gpu:
        return pl.run_state(multiply)(ACC.init(acc))
    # The interpreter cannot carry an accumulator through run_state.
    acc = acc + pl.run_scoped(multiply, ACC((LATENT, acc.shape[1]), jnp.float32))
    plgpu.commit_smem()
    for each in values:
        if each.release is not None:
            each.release()
    return acc
