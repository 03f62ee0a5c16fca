"""Checks of sparse attention's kernels against float32 references; see :mod:`checks`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import sparse_inputs
from benchmarks.kernels.sparse_inputs import Arrays, Host, options
from benchmarks.kernels.sparse_shapes import (
    INDEX_COLUMNS,
    PAGE,
    Index,
    SparseAttention,
    SparseCase,
    TopK,
)
from pallas_kernels.mla_decode.float8_cache import dequantize_latent
from pallas_kernels.sparse_index import reference as index
from pallas_kernels.sparse_index import scaled_pages
from pallas_kernels.sparse_mla_decode import reference as decode
from pallas_kernels.sparse_mla_prefill import reference as prefill
from pallas_kernels.top_k import reference as top_k

Checked = tuple[jax.Array, jax.Array | None]

_LENGTHS = (5, 0, PAGE - 1, PAGE, PAGE + 1, 1000, 700, 300)


def comparable(case: SparseCase, result: Checked) -> Checked:
    """Makes results comparable by relative errors of rows.

    Scores of hidden tokens become 0. Indices become random numbers, so that a single wrong one of
    thousands exceeds the tolerance.
    """
    out, lse = result
    if isinstance(case, Index):
        return jnp.where(jnp.isneginf(out), 0.0, out), lse
    if isinstance(case, TopK):
        mixed = out.astype(jnp.uint32) * jnp.uint32(2654435761)
        return mixed.astype(jnp.float32) * 2.0**-31 - 1.0, lse
    return result


def ragged(case: SparseCase, seed: int) -> tuple[SparseCase, Host]:
    """Returns a small version of a case, and its host arrays with what must not be read."""
    rng = np.random.default_rng(seed)
    if isinstance(case, TopK):
        return dataclasses.replace(case, rows=4, columns=case.k + 1500), {}
    if isinstance(case, Index):
        small = dataclasses.replace(
            case, rows=len(_LENGTHS), cached=1024, queries=min(case.queries, 5)
        )
        host = sparse_inputs.host(small, seed)
        used = np.zeros((host["block_tables"].size, PAGE), bool)
        for (b, page), number in np.ndenumerate(host["block_tables"]):
            used[number, : max(0, _LENGTHS[b] - page * PAGE)] = True
        return small, host | {"lengths": np.array(_LENGTHS, np.int32), "used": used}
    small = dataclasses.replace(case, rows=3, cached=1024, queries=min(case.queries, 5), topk=300)
    indices = np.full((small.rows, small.queries, small.topk), -1, np.int32)
    for b, t in np.ndindex(*indices.shape[:2]):
        count = (0, 1, 128, 299, 300)[rng.integers(5)]
        columns = rng.permutation(small.topk)[:count]
        indices[b, t, columns] = rng.permutation(small.cached)[:count]
    used = np.zeros((small.rows, small.cached), bool)
    for b in range(small.rows):
        used[b, indices[b][indices[b] >= 0]] = True
    return small, sparse_inputs.host(small, seed) | {"indices": indices, "used": used}


def build_ragged(case: SparseCase, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    """Returns the arguments, with NaN in what must not be read, and the expected result."""
    host_arrays = {name: jnp.asarray(x) for name, x in host.items()}
    used = host_arrays.pop("used", None)
    arrays = sparse_inputs.build(case, key, host_arrays) | host_arrays
    arrays = jax.lax.optimization_barrier(arrays)
    if isinstance(case, TopK):
        row = jnp.arange(case.rows)[:, None]
        scores = jnp.where(row == 1, jnp.round(arrays["scores"] * 2), arrays["scores"])  # ties
        hidden = (row >= 2) & (jnp.arange(case.columns) >= case.k - 7 * row)
        arrays = {"scores": jnp.where(hidden, -jnp.inf, scores)}
        return arrays, comparable(case, (top_k.top_k(**arrays, **options(case)), None))
    assert used is not None
    if isinstance(case, Index):
        want = comparable(case, (index.blocked(**arrays, **options(case)), None))
        keys, scales = scaled_pages.split(arrays["pages"], INDEX_COLUMNS, PAGE)
        keys = jnp.where(used[..., None], keys, jnp.asarray(jnp.nan, keys.dtype))
        scales = jnp.where(used, scales, jnp.nan)[..., None]
        pages = scaled_pages.pages_of(scaled_pages.token_bytes(keys, scales))
        return arrays | {"pages": pages}, want
    want = _attend(case, arrays)
    if case.op == "sparse_mla_prefill":
        latents = jnp.where(used[..., None], arrays["latents"], jnp.nan)
        return arrays | {"latents": latents}, want
    by_page = used.reshape(case.rows, -1, PAGE)
    slots = jnp.zeros(arrays["pages"].shape[:2], bool)
    slots = slots.at[arrays["block_tables"]].set(by_page)
    # In a float8 cache, 255 is NaN in all three fields of a token.
    nan = jnp.uint8(255) if case.dtype == "fp8" else jnp.asarray(jnp.nan, jnp.bfloat16)
    return arrays | {"pages": jnp.where(slots[..., None], arrays["pages"], nan)}, want


def _attend(case: SparseAttention, arrays: Arrays) -> Checked:
    wide = {
        name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in arrays.items()
    }
    if case.op == "sparse_mla_prefill":
        return prefill.sparse_mla_prefill(**wide, **options(case))
    if case.dtype == "fp8":  # what the cache stores, rounded as the tensor cores take it
        stored = dequantize_latent(arrays["pages"], jnp.bfloat16)
        wide["pages"] = jnp.concatenate(stored, axis=-1).astype(jnp.float32)
    return decode.sparse_mla_decode(**wide, **options(case))


def spot(case: SparseCase, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    """Returns a sample of a timed shape's result, and the expected values. To be traced."""
    rows = jnp.asarray(sorted({0, case.rows // 2, case.rows - 1})[-2:])
    out, lse = result
    if isinstance(case, TopK):
        want = top_k.top_k(arrays["scores"][rows], case.k)
        return comparable(case, (out[rows], None)), comparable(case, (want, None))
    t = slice(max(0, case.queries - 3), case.queries)  # the last queries, which end where rows do
    some = arrays | {
        name: arrays[name][rows] for name in ("block_tables", "lengths") if name in arrays
    }
    if isinstance(case, Index):
        some |= {name: arrays[name][rows, t] for name in ("q", "weights")}
        want = index.blocked(**some, **options(case))
        return comparable(case, (out[rows, t], None)), comparable(case, (want, None))
    some |= {name: arrays[name][rows, t] for name in ("q_latent", "q_rope", "indices")}
    if case.op == "sparse_mla_prefill":
        some["latents"] = arrays["latents"][rows]
    else:  # only the pages of these rows, because all of them do not fit in float32
        tables = some["block_tables"]
        some["pages"] = arrays["pages"][tables.reshape(-1)]
        some["block_tables"] = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    want_out, want_lse = _attend(case, some)
    if lse is None:
        return (out[rows, t], None), (want_out, None)
    return (out[rows, t], lse[rows, t]), (want_out, want_lse)
