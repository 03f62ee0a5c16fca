"""mla_prefill on TPUs (Pallas Mosaic TPU): bfloat16 and float32, keys and values of any widths.

A grid step processes a block of queries of one head against a segment of its keys and values. If
VMEM has room, the segment is all of them, and then they are read from HBM once per head, whatever
the number of queries. The step loops over the segment in chunks, with an online softmax
(:class:`pallas_kernels.tpu.OnlineSoftmax`).

* ``starts`` and ``lengths`` bound the loop. Chunks that no query sees are not computed, and such
  segments are not copied either.
* The head dimension precedes the token dimension in HBM, so that a head's tokens are contiguous.
  XLA can write the result of a projection in this layout at no cost; arguments of a program are
  transposed.
* K = 192 is padded to 256 columns in HBM, in VMEM and in the matrix units.

Among the kernels that come with JAX, flash_attention requires keys and values of one width, and
splash_attention a mask known at compile time. Neither takes per-sequence ``starts``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.mla_prefill.gradients import differentiable
from pallas_kernels.mla_prefill.reference import bounds
from pallas_kernels.tpu import (
    Chip,
    OnlineSoftmax,
    dot,
    require_tpu,
    require_vmem,
    softmax_bytes,
    tile_rows,
    tiled_bytes,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes: multiples of 128, limited to the whole dimension."""

    rows: int = 512  # queries per block
    chunk: int = 1024  # keys per chunk, the unit of computation

    segment: int | None = None
    """Number of keys per segment, the unit of copying, in whole chunks. The default is the largest
    number that fits in VMEM."""


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    *,
    scale: float,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_prefill`.

    Args:
      config: tile sizes.
      interpret: ``pallas_call``'s argument, to run without a TPU.
    """
    chip = require_tpu(interpret)
    dtypes = {x.dtype.name for x in (q, k, v)}
    if dtypes not in ({"bfloat16"}, {"float32"}):
        raise NotImplementedError(f"takes bfloat16 or float32, got {', '.join(sorted(dtypes))}")
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError(f"takes no empty arrays, got q {q.shape} and k {k.shape}")
    plan = _plan(config or Config(), q, k, v, scale, chip)

    def attend(q, k, v, starts, lengths):
        return _attend(plan, q, k, v, *bounds(k, starts, lengths), interpret=interpret)

    return differentiable(attend, scale=scale)(q, k, v, starts, lengths)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static sizes of one compiled kernel."""

    heads: int
    rows: int
    chunk: int
    segment: int
    scale: float
    vmem: int  # VMEM limit for the compiler, in bytes


def _plan(config: Config, q, k, v, scale: float, chip: Chip) -> _Plan:
    """Chooses the largest segments that fit in VMEM."""
    _, T, H, K = q.shape
    S, V, dtype = k.shape[1], v.shape[-1], q.dtype
    tile = tile_rows(dtype)
    rows, chunk = min(config.rows, T), min(config.chunk, -(-S // tile) * tile)

    def blocks(segment: int) -> dict[str, int]:
        return {
            "queries": 2 * tiled_bytes((rows, K), dtype),
            "keys and values": 2 * sum(tiled_bytes((segment, n), dtype) for n in (K, V)),
            "results": 2 * (tiled_bytes((rows, V), dtype) + tiled_bytes((1, rows), jnp.float32)),
            **softmax_bytes(rows, V, chunk, K + V),
        }

    segment = config.segment or -(-S // chunk) * chunk
    while segment > chunk and sum(blocks(segment).values()) > chip.budget:
        segment -= chunk
    require_vmem(chip, blocks(segment))
    vmem = sum(blocks(segment).values()) + chip.vmem - chip.budget
    return _Plan(H, rows, chunk, segment, scale, vmem)


@functools.partial(jax.jit, static_argnums=0, static_argnames="interpret")
def _attend(
    plan: _Plan,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    interpret: Any,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    B, T, H, K = q.shape
    S, V = v.shape[1], v.shape[-1]
    q, k, v = (x.swapaxes(1, 2).reshape(B * H, *x.shape[1:2], x.shape[-1]) for x in (q, k, v))

    def keys(head, block, segment, starts, lengths):
        """Returns a segment's block index. Unseen segments map to the last one that is seen."""
        last = _visible_keys(plan, starts, lengths, head, (block + 1) * plan.rows)
        return head, jnp.minimum(segment, jnp.maximum(pl.cdiv(last, plan.segment) - 1, 0)), 0

    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=(
            jax.ShapeDtypeStruct((B * H, T, V), q.dtype),
            jax.ShapeDtypeStruct((B * H, 1, T), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * H, pl.cdiv(T, plan.rows), pl.cdiv(S, plan.segment)),
            in_specs=[
                pl.BlockSpec((1, plan.rows, K), lambda head, block, *_: (head, block, 0)),
                pl.BlockSpec((1, plan.segment, K), keys),
                pl.BlockSpec((1, plan.segment, V), keys),
            ],
            out_specs=[
                pl.BlockSpec((1, plan.rows, V), lambda head, block, *_: (head, block, 0)),
                pl.BlockSpec((1, 1, plan.rows), lambda head, block, *_: (head, 0, block)),
            ],
            scratch_shapes=OnlineSoftmax.scratch(plan.rows, V),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=plan.vmem
        ),
        interpret=interpret,
        name="mla_prefill",
    )(starts.astype(jnp.int32), jnp.clip(lengths.astype(jnp.int32), 0, S), q, k, v)
    return out.reshape(B, H, T, V).swapaxes(1, 2), lse.reshape(B, H, T).swapaxes(1, 2)


def _visible_keys(plan: _Plan, starts, lengths, head, query):
    """Returns the number of keys that any query before index ``query`` sees."""
    sequence = head // plan.heads
    return jnp.clip(starts[sequence] + query, 0, lengths[sequence])


def _kernel(
    plan: _Plan,
    starts,  # SMEM [B]
    lengths,  # SMEM [B], S at most
    q,  # VMEM [1, rows, K]
    k,  # VMEM [1, segment, K]
    v,  # VMEM [1, segment, V]
    out,  # VMEM [1, rows, V]
    lse,  # VMEM [1, 1, rows]
    *softmax,
) -> None:
    head, segment, sums = pl.program_id(0), pl.program_id(2), OnlineSoftmax(*softmax)
    first_query, first_key = pl.program_id(1) * plan.rows, segment * plan.segment
    sequence = head // plan.heads
    query = first_query + lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    visible = jnp.minimum(starts[sequence] + query + 1, lengths[sequence])

    @pl.when(segment == 0)
    def _():
        sums.clear()

    last = _visible_keys(plan, starts, lengths, head, first_query + plan.rows) - first_key

    @pl.loop(0, pl.cdiv(jnp.clip(last, 0, plan.segment), plan.chunk))
    def _(i):
        window = pl.ds(pl.multiple_of(i * plan.chunk, plan.chunk), plan.chunk)
        key = first_key + i * plan.chunk
        keys = key + lax.broadcasted_iota(jnp.int32, (1, plan.chunk), 1)
        scores = plan.scale * dot(q[0], k[0, window], transposed=True)
        # Values past the sequence's end may be NaN, and 0 * NaN is NaN.
        valid = key + lax.broadcasted_iota(jnp.int32, (plan.chunk, 1), 0) < lengths[sequence]
        sums.add(jnp.where(keys < visible, scores, -jnp.inf), jnp.where(valid, v[0, window], 0))

    @pl.when(segment == pl.num_programs(2) - 1)
    def _():
        result, lse[0] = sums.result()
        out[0] = result.astype(out.dtype)
