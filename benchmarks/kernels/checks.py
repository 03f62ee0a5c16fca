"""Checks samples of a timed shape's result against full-precision float32 references.

``tests/pallas_kernels/test_ragged_inputs.py`` checks the same ops on small ragged inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import inputs
from benchmarks.kernels.inputs import Arrays, options
from benchmarks.kernels.shapes import (
    BLOCK,
    Case,
    Decode,
    Gradient,
    Grouped,
    Index,
    Prefill,
    PrefillGradient,
    SparseAttention,
    SparseCase,
    Swiglu,
    TopK,
)
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_decode.float8_cache import dequantize_latent
from pallas_kernels.mla_prefill import blocked as prefill_blocked
from pallas_kernels.mla_prefill import reference as prefill_reference
from pallas_kernels.sparse_index import reference as index
from pallas_kernels.sparse_mla_decode import reference as sparse_reference
from pallas_kernels.top_k import reference as top_k_reference

TOLERANCE = 2 * 2.0**-8
"""Relative to a row's Euclidean norm: a rounding of a factor to bfloat16, and one of the result."""

LSE_TOLERANCE = 2e-3

# Output, and LSE of attention ops. The output of attention's gradient is three arrays.
Checked = tuple[Any, jax.Array | None]


def rows_error(got: Any, want: Any) -> jax.Array:
    """Returns the largest relative error of any row, or inf if a value is not finite. Each may be
    one array or a tuple of them."""
    if isinstance(got, tuple):
        each = [rows_error(a, b) for a, b in zip(got, want, strict=True)]
        return jnp.max(jnp.stack(each))
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    difference = jnp.linalg.norm(got - want, axis=-1)
    size = jnp.linalg.norm(want, axis=-1)
    error = jnp.where(difference == 0, 0, difference / size)
    return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf), initial=0)


def lse_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the largest absolute error of log-sum-exps, or inf if a value is not finite."""
    same = jnp.isneginf(got) & jnp.isneginf(want)
    error = jnp.where(same, 0, jnp.abs(got - want))
    return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf), initial=0)


def errors(got: Checked, want: Checked) -> tuple[jax.Array, jax.Array]:
    """Returns the errors of the output and of the LSE."""
    out = rows_error(got[0], want[0])
    if got[1] is None or want[1] is None:
        return out, jnp.zeros(())
    return out, lse_error(got[1], want[1])


def verdict(measured: tuple[jax.Array, jax.Array]) -> str | None:
    """Returns None if :func:`errors` are within the tolerances, else a message."""
    error, lse = (float(x) for x in measured)
    if error <= TOLERANCE and lse <= LSE_TOLERANCE:
        return None
    return f"wrong: relative error {error:.3g}, LSE off by {lse:.3g}"


def unequal(a: Checked, b: Checked) -> jax.Array:
    """Returns how many values differ. NaN counts as different, because no result may contain it."""
    builders = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum((jnp.sum(x != y) for x, y in builders), jnp.int32(0))


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


def spot(case: Case, arrays: Arrays, result: Checked) -> tuple[jax.Array, jax.Array]:
    """Returns :func:`errors` of sampled rows of a result. To be traced."""
    if isinstance(case, SparseCase):
        with jax.default_matmul_precision("highest"):
            return errors(*_spot_sparse(case, arrays, result))
    builders = {
        Decode: _spot_decode, Grouped: _spot_grouped, Prefill: _spot_prefill,
        PrefillGradient: _spot_prefill_gradient,
    }  # fmt: skip
    with jax.default_matmul_precision("highest"):
        return errors(*builders[kind(case)](case, arrays, result))


def _spot_decode(case: Decode, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    rows = jnp.asarray(sorted({0, case.rows // 2, case.rows - 1})[-2:])
    tables = arrays["block_tables"][rows]
    per_row = tables.shape[1]
    pages = dense_pages(case, arrays["pages"][tables.reshape(-1)])
    want = decode_reference.mla_decode(
        arrays["q_latent"][rows].astype(jnp.float32),
        arrays["q_rope"][rows].astype(jnp.float32),
        pages.astype(jnp.float32),
        jnp.arange(tables.size).reshape(-1, per_row),
        arrays["lengths"][rows],
        **options(case),
    )
    return (result[0][rows], None if result[1] is None else result[1][rows]), (
        want[0],
        None if result[1] is None else want[1],
    )


def _spot_grouped(case: Grouped, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    if isinstance(case, Gradient) and case.of == "matrices":
        groups = np.unique(np.linspace(0, len(case.sizes) - 1, 5).astype(int))
        columns = np.unique(np.linspace(0, case.N - 1, 7).astype(int))
        want = [matrix_rows(arrays, g, jnp.asarray(columns)) for g in groups]
        return (result[0][groups][:, columns], None), (jnp.stack(want), None)
    rows = np.unique(np.linspace(0, case.M - 1, 24).astype(int))
    groups = jnp.searchsorted(jnp.cumsum(arrays["group_sizes"]), rows, side="right")
    names = {"lhs", "lhs_scale", "d_out"} & set(arrays)
    lhs = row_operand(case, {name: arrays[name][rows] for name in names})

    def one(row_and_group):
        row, g = row_and_group
        return apply_group(case, arrays, g, row[None])[0]

    return (result[0][rows], None), (jax.lax.map(one, (lhs, groups)), None)


def _spot_prefill(case: Prefill, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    queries = np.unique(np.linspace(0, case.queries - 1, 7).astype(int))
    last = slice(-1, None)
    wide = {name: arrays[name][last].astype(jnp.float32) for name in ("q", "k", "v")}
    each = [
        prefill_reference.mla_prefill(
            wide["q"][:, t : t + 1], wide["k"], wide["v"],
            arrays["starts"][last] + t, arrays["lengths"][last], **options(case),
        )
        for t in queries.tolist()
    ]  # fmt: skip
    out = jnp.concatenate([out for out, _ in each], axis=1)
    lse = jnp.concatenate([lse for _, lse in each], axis=1)
    got_lse = None if result[1] is None else result[1][last, queries]
    return (result[0][last, queries], got_lse), (out, None if got_lse is None else lse)


def _spot_prefill_gradient(
    case: PrefillGradient, arrays: Arrays, result: Checked
) -> tuple[Checked, Checked]:
    heads = np.unique([0, case.heads - 1])
    names = "q", "k", "v", "out", "lse", "d_out"
    q, k, v, out, lse, d_out = (arrays[name][-1:, :, heads].astype(jnp.float32) for name in names)
    want = prefill_blocked.gradients(
        q, k, v, None, None, None, out, lse, d_out, None, **options(case)
    )
    return (by_head(tuple(x[-1:, :, heads] for x in result[0])), None), (by_head(want), None)


def by_head(gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns gradients of attention with a row for each head of a sequence. The numbers of a
    single query or key may cancel out, for example those of the first query."""
    return tuple(jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1) for x in gradients)


def _spot_sparse(case: SparseCase, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    """Returns a sample of a timed shape's result, and the expected values. To be traced."""
    rows = jnp.asarray(sorted({0, case.rows // 2, case.rows - 1})[-2:])
    out, lse = result
    if isinstance(case, TopK):
        want = top_k_reference.top_k(arrays["scores"][rows], case.k)
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
    want_out, want_lse = attend(case, some)
    if lse is None:
        return (out[rows, t], None), (want_out, None)
    return (out[rows, t], lse[rows, t]), (want_out, want_lse)


def attend(case: SparseAttention, arrays: Arrays) -> Checked:
    wide = {
        name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in arrays.items()
    }
    if case.op == "sparse_mla_prefill":
        return sparse_reference.sparse_mla_prefill(**wide, **options(case))
    if case.dtype == "fp8":  # what the cache stores, rounded as the tensor cores take it
        stored = dequantize_latent(arrays["pages"], jnp.bfloat16)
        wide["pages"] = jnp.concatenate(stored, axis=-1).astype(jnp.float32)
    return sparse_reference.sparse_mla_decode(**wide, **options(case))


def kind(case: Case) -> type[Case]:
    return Grouped if isinstance(case, Grouped) else type(case)


def dense_pages(case: Decode, pages: jax.Array) -> jax.Array:
    """Returns dequantized pages, [P, page, LATENT + ROPE]."""
    if case.dtype == "fp8":
        return jnp.concatenate(dequantize_latent(pages, jnp.bfloat16), axis=-1)
    return pages


def row_operand(case: Grouped, arrays: Arrays) -> jax.Array:
    """Returns the rows that meet their group's matrix, in float32."""
    if isinstance(case, Gradient):
        return arrays["d_out"].astype(jnp.float32)
    return _dense_rows(arrays["lhs"], arrays.get("lhs_scale"))


def apply_group(case: Grouped, arrays: Arrays, g: jax.Array, lhs: jax.Array) -> jax.Array:
    """Applies group g's matrices to rows [M, K], or to rows [M, N] of a gradient."""
    if isinstance(case, Gradient):
        return lhs @ arrays["rhs"][g].astype(jnp.float32)
    outputs = [lhs @ _dense_matrix(case, arrays, g, name).T for name in inputs.matrices(case)]
    if isinstance(case, Swiglu):
        return jax.nn.silu(outputs[0]) * outputs[1]
    return outputs[0]


def _dense_rows(lhs: jax.Array, scale: jax.Array | None) -> jax.Array:
    lhs = lhs.astype(jnp.float32)
    if scale is None:
        return lhs
    return lhs * jnp.repeat(scale, BLOCK, axis=-1)[..., : lhs.shape[-1]]


def _dense_matrix(case: Grouped, arrays: Arrays, g: jax.Array, name: str) -> jax.Array:
    """Returns group g's dequantized matrix, float32 [N, K]."""
    values = arrays[name][g]
    if case.dtype == "int4":
        halves = jnp.stack([values & 15, values >> 4], axis=-1).astype(jnp.int8)
        values = jnp.where(halves < 8, halves, halves - 16).reshape(case.N, case.K)
    values = values.astype(jnp.float32)
    if f"{name}_scale" not in arrays:
        return values
    scale = arrays[f"{name}_scale"][g]
    rows, columns = options(case)["block_shape"]
    spread = jnp.repeat(jnp.repeat(scale, rows, axis=0), columns, axis=1)
    return values * spread[: case.N, : case.K]


def matrix_rows(arrays: Arrays, g: Any, columns: jax.Array) -> jax.Array:
    """Returns rows of group g's gradient of its matrix, for columns of d_out."""
    end = jnp.cumsum(arrays["group_sizes"])[g]
    row = jnp.arange(len(arrays["lhs"]))[:, None]
    inside = (row < end) & (row >= end - arrays["group_sizes"][g])
    d_out = jnp.where(inside, arrays["d_out"][:, columns].astype(jnp.float32), 0)
    return d_out.T @ arrays["lhs"].astype(jnp.float32)
