"""The gradient of mla_prefill on Hopper GPUs (bfloat16), by the two :mod:`gradient_kernels`.

Their buffer of d_s is limited (:data:`BUFFER_BYTES`): the kernels run for some sequences and heads
at a time, and for some of a long sequence's keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.hopper import require_hopper
from pallas_kernels.hopper.online_softmax import LOG2E
from pallas_kernels.mla_prefill import reference
from pallas_kernels.mla_prefill.gradient_kernels import (
    BLOCK,
    CELL_BYTES,
    CONSUMERS,
    PANEL,
    TILE,
    Plan,
    launch,
)
from pallas_kernels.mla_prefill.tiles import Cells

BUFFER_BYTES = 9 << 28
"""Bytes of d_s at a time, at most. 4 x 4,096 tokens with 16 heads have 4.1 << 28. Two heads of
32,768 have twice that; with less, there would be fewer tiles of queries than multiprocessors."""


def gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None,
    lengths: Int[Array, " B"] | None,
    out: Float[Array, "B T H V"],
    lse: Float32[Array, "B T H"],
    d_out: Float[Array, "B T H V"],
    d_lse: Float32[Array, "B T H"] | None,
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Returns the gradients of q, k and v, as :func:`blocked.gradients`. Equal calls give equal
    bits."""
    require_hopper(interpret)
    arrays = {"q": q, "k": k, "v": v, "d_out": d_out}
    if wrong := {name: x.dtype.name for name, x in arrays.items() if x.dtype != jnp.bfloat16}:
        raise NotImplementedError(f"takes bfloat16, got {wrong}")
    K, V = q.shape[-1], v.shape[-1]
    if K % PANEL or V % PANEL or not 0 < V <= min(K, 128) or K > 192:
        raise NotImplementedError(
            "takes keys 64, 128 or 192 wide and values 64 or 128 wide, no wider than the keys,"
            f" got {K} and {V}"
        )
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError(f"takes no empty arrays, got q {q.shape} and k {k.shape}")

    S, causal = k.shape[1], starts is None
    if lengths is not None:
        # Keys and values past the end may be NaN, and 0 * NaN is NaN.
        valid = (jnp.arange(S) < lengths[:, None])[..., None, None]
        k, v = jnp.where(valid, k, 0), jnp.where(valid, v, 0)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta if d_lse is None else delta - d_lse
    lse = jnp.where(lse == -jnp.inf, 0.0, lse) * LOG2E  # queries that see no key: all is masked
    starts, lengths = (x.astype(jnp.int32) for x in reference.bounds(k, starts, lengths))
    of_keys = functools.partial(
        _of_some_keys, q, d_out=d_out, lse=lse, delta=delta, scale=float(scale), interpret=interpret
    )
    at_once = _cells(q.shape[1], S, causal).keys_in(BUFFER_BYTES // CELL_BYTES, CONSUMERS) * BLOCK
    if at_once >= S:
        return of_keys(k, v, starts, lengths, causal=causal)
    parts = []
    for first in range(0, S, at_once):
        some = slice(first, first + at_once)
        bounds = starts - first, jnp.clip(lengths - first, 0, at_once)
        parts.append(of_keys(k[:, some], v[:, some], *bounds, causal=False))
    d_qs, d_ks, d_vs = zip(*parts, strict=True)
    d_q = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in d_qs)).astype(q.dtype)
    return d_q, jnp.concatenate(d_ks, axis=1), jnp.concatenate(d_vs, axis=1)


def _of_some_keys(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, lengths: jax.Array, *,
    d_out: jax.Array, lse: jax.Array, delta: jax.Array, scale: float, causal: bool, interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns the gradients, where the cells of one head fit in the buffer. ``causal``: all starts
    are 0."""
    (B, T, H, _), S = q.shape, k.shape[1]
    # TMA copies of one dimension are not clipped at T.
    lse, delta = (_padded(x.swapaxes(1, 2), 2, pl.cdiv(T, BLOCK) * BLOCK) for x in (lse, delta))
    # A box of a TMA copy is no larger than the array.
    q, d_out = (_padded(x, 1, max(T, BLOCK)) for x in (q, d_out))
    k, v = (_padded(x, 1, max(S, TILE)) for x in (k, v))
    bounds = {"starts": starts, "lengths": lengths}
    pairs = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": lse, "delta": delta}
    cells = _cells(T, S, causal)
    sequences, heads = cells.heads_in(BUFFER_BYTES // CELL_BYTES, B, H)
    plan = functools.partial(
        Plan.of,
        q,
        k,
        v,
        T,
        S,
        sequences,
        heads,
        scale,
        cells,
        interpret is not None,
    )

    def of_heads(first: jax.Array) -> list[jax.Array]:
        """Returns the gradients of the heads from a sequence and a head on."""
        arrays = {**bounds, "first": first}
        *d_kv, d_s = launch({**pairs, **arrays}, plan=plan(of_keys=True), interpret=interpret)
        of_queries = {"k": k, "d_s": d_s, **arrays}
        return [
            *launch(of_queries, plan=plan(of_keys=False), interpret=interpret),
            *d_kv,
        ]

    def add_heads(i: Any, results: list[jax.Array]) -> list[jax.Array]:
        first, parts = firsts[i], of_heads(firsts[i])
        place = first[0], 0, first[1], 0
        return [lax.dynamic_update_slice(*x, place) for x in zip(results, parts, strict=True)]

    if (sequences, heads) == (B, H):
        d_q, d_k, d_v = of_heads(jnp.zeros(2, jnp.int32))
    else:
        firsts = jnp.mgrid[0:B:sequences, 0:H:heads].reshape(2, -1).T.astype(jnp.int32)
        # The first ones are padded, because XLA would make arrays of zeros long before.
        results = [
            lax.pad(
                x,
                jnp.zeros((), x.dtype),
                [(0, a - b, 0) for a, b in zip(shape, x.shape, strict=True)],
            )
            for x, shape in zip(
                of_heads(firsts[0]), ((B, T, *q.shape[2:]), k.shape, v.shape), strict=True
            )
        ]
        d_q, d_k, d_v = lax.fori_loop(1, len(firsts), add_heads, results)
    return d_q, d_k[:, :S], d_v[:, :S]


def _cells(T: int, S: int, causal: bool) -> Cells:
    return Cells(pl.cdiv(T, BLOCK), CONSUMERS * pl.cdiv(S, TILE), causal)


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, padding) if padding[axis][1] else x
