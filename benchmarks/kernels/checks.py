"""Checks an op against full-precision float32 references before it is timed.

:class:`Ragged` has small inputs that cover every kind of sequence or group, with NaN in everything
that the op must not read. :func:`spot` checks samples of the output of a timed shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import inputs, layer_inputs, sparse_checks
from benchmarks.kernels.inputs import Arrays, Host, options
from benchmarks.kernels.layer_shapes import FeedForward
from benchmarks.kernels.shapes import (
    BLOCK,
    PAGE,
    Case,
    Decode,
    Gradient,
    Grouped,
    Prefill,
    SparseCase,
    Swiglu,
)
from pallas_kernels import dequantize_latent
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_prefill import reference as prefill_reference

TOLERANCE = 2 * 2.0**-8
"""Relative to a row's Euclidean norm: a rounding of a factor to bfloat16, and one of the result."""

LSE_TOLERANCE = 2e-3

Checked = tuple[jax.Array, jax.Array | None]  # output, and LSE of attention ops


def rows_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the largest relative error of any row, or inf if a value is not finite."""
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


# ---- small ragged inputs -------------------------------------------------------------------------

# Rows per group. The average selects the kernel; quantized matrices take up to 64 on average.
_SIZES = (1, 0, 3, 2, 0, 4, 1, 0), (700, 0, 1, 130, 13, 0, 202, 64)
_SIZES_QUANTIZED = _SIZES[0], (2, 0, 1, 50, 13, 0, 16, 9), (9, 0, 1, 300, 13, 0, 60, 64)
_SPARE = 37  # rows that belong to no group


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A small ragged version of a case: ``case`` has its shapes, ``host`` its integer arrays."""

    case: Case
    host: Host
    rows: int | None = None
    """Number of defined rows of the result, or None for all."""

    def build(self, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
        """Returns the arguments and the expected result. To be traced."""
        if isinstance(self.case, SparseCase):
            with jax.default_matmul_precision("highest"):
                return sparse_checks.build_ragged(self.case, key, host)
        if isinstance(self.case, FeedForward):
            with jax.default_matmul_precision("highest"):
                arrays = _rounded(self.case, key, host)
                return arrays, (layer_inputs.exact(self.case, arrays), None)
        builders = {Decode: _ragged_decode, Grouped: _ragged_grouped, Prefill: _ragged_prefill}
        with jax.default_matmul_precision("highest"):
            return builders[_kind(self.case)](self, key, host)

    def defined(self, result: Checked) -> Checked:
        if isinstance(self.case, SparseCase):
            return sparse_checks.comparable(self.case, result)
        return result[0][: self.rows], result[1]


def _kind(case: Case) -> type[Case]:
    return Grouped if isinstance(case, Grouped) else type(case)


def _sizes(case: Grouped) -> tuple[tuple[int, ...], ...]:
    return _SIZES_QUANTIZED if case.dtype in ("int8", "int4") else _SIZES


def seeds(case: Case) -> range:
    """Returns the seeds for :func:`ragged`: one, or one for each set of group sizes."""
    return range(len(_sizes(case)) if isinstance(case, Grouped) else 1)


def ragged(case: Case, seed: int) -> Ragged:
    if isinstance(case, SparseCase):
        return Ragged(*sparse_checks.ragged(case, seed))
    if isinstance(case, FeedForward):
        return Ragged(dataclasses.replace(case, small=True), {})
    rng = np.random.default_rng(seed)
    if isinstance(case, Decode):
        lengths = np.array([case.queries, 0, PAGE - 1, PAGE, PAGE + 1, 1000, 4097, 300], np.int32)
        max_pages = -(-4097 // PAGE)
        small = dataclasses.replace(
            case, rows=len(lengths), cached=max_pages * PAGE, ragged=(), name=""
        )
        tables = inputs.host(small, seed)["block_tables"]
        used = np.zeros((tables.size, PAGE), bool)
        for (b, page), number in np.ndenumerate(tables):
            valid_slots = np.clip(lengths[b] - page * PAGE, 0, PAGE)
            used[number, :valid_slots] = True
            if not valid_slots:
                tables[b, page] = rng.choice([-1, 2**30, 7])
        return Ragged(small, {"block_tables": tables, "lengths": lengths, "used": used})
    if isinstance(case, Grouped):
        sizes = _sizes(case)[seed]
        small = dataclasses.replace(case, sizes=(*sizes[:-1], sizes[-1] + _SPARE))
        of_matrices = isinstance(case, Gradient) and case.of == "matrices"
        rows = None if of_matrices else sum(sizes)
        return Ragged(small, {"group_sizes": np.asarray(sizes, np.int32)}, rows)
    small = dataclasses.replace(case, rows=4, queries=300, keys=700, heads=4)
    starts, lengths = np.array([0, 100, 400, 700]), np.array([300, 257, 700, 64])
    return Ragged(small, {"starts": starts.astype(np.int32), "lengths": lengths.astype(np.int32)})


def _ragged_decode(ragged: Ragged, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    case, used = ragged.case, jnp.asarray(host["used"])[..., None]
    given = {name: x for name, x in host.items() if name != "used"}
    arrays = _rounded(case, key, given)
    assert isinstance(case, Decode)
    want = decode_reference.mla_decode(
        **_wide(arrays | {"pages": dense_pages(case, arrays["pages"])}),
        **options(case),
    )
    return arrays | {"pages": poisoned_pages(case, arrays["pages"], used)}, want


def _rounded(case: Case, key: jax.Array, host: Host) -> Arrays:
    """Builds inputs rounded as the op receives them; XLA would otherwise fuse away the rounding."""
    return jax.lax.optimization_barrier(inputs.build(case, key, host))


def dense_pages(case: Decode, pages: jax.Array) -> jax.Array:
    """Returns dequantized pages, [P, page, LATENT + ROPE]."""
    if case.dtype == "fp8":
        return jnp.concatenate(dequantize_latent(pages, jnp.bfloat16), axis=-1)
    return pages


def poisoned_pages(case: Decode, pages: jax.Array, used: jax.Array) -> jax.Array:
    """Writes NaN to the slots that no sequence uses."""
    if case.dtype == "fp8":
        return jnp.where(used, pages, jnp.uint8(255))  # NaN in all three fields of a token
    return jnp.where(used, pages, jnp.nan)


def _wide(arrays: Arrays) -> Arrays:
    return {
        name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in arrays.items()
    }


def _ragged_grouped(ragged: Ragged, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    case, M = ragged.case, ragged.rows
    assert isinstance(case, Grouped)
    arrays = _rounded(case, key, host)
    want = _every_group(case, arrays)[:M]
    defined = jnp.arange(case.M)[:, None] < jnp.sum(arrays["group_sizes"])
    for name in {"lhs", "lhs_scale", "d_out"} & set(arrays):
        arrays[name] = jnp.where(defined, arrays[name], jnp.asarray(jnp.nan, arrays[name].dtype))
    return arrays, (want, None)


def _every_group(case: Grouped, arrays: Arrays) -> jax.Array:
    if isinstance(case, Gradient) and case.of == "matrices":
        G, (N, K) = len(arrays["group_sizes"]), (case.N, case.K)
        each = (_matrix_rows(arrays, g, jnp.arange(N)) for g in range(G))
        return jnp.stack(list(each)).reshape(G, N, K)
    lhs = _row_operand(case, arrays)
    ends = jnp.cumsum(arrays["group_sizes"])
    row = jnp.arange(len(lhs))[:, None]

    def add(g, out):
        inside = (row < ends[g]) & (row >= ends[g] - arrays["group_sizes"][g])
        return jnp.where(inside, _apply_group(case, arrays, g, lhs), out)

    G = len(arrays["group_sizes"])
    columns = case.K if isinstance(case, Gradient) else case.N
    return jax.lax.fori_loop(0, G, add, jnp.zeros((len(lhs), columns), jnp.float32))


def _matrix_rows(arrays: Arrays, g: Any, columns: jax.Array) -> jax.Array:
    """Returns rows of group g's gradient of its matrix, for columns of d_out."""
    end = jnp.cumsum(arrays["group_sizes"])[g]
    row = jnp.arange(len(arrays["lhs"]))[:, None]
    inside = (row < end) & (row >= end - arrays["group_sizes"][g])
    d_out = jnp.where(inside, arrays["d_out"][:, columns].astype(jnp.float32), 0)
    return d_out.T @ arrays["lhs"].astype(jnp.float32)


def _row_operand(case: Grouped, arrays: Arrays) -> jax.Array:
    """Returns the rows that meet their group's matrix, in float32."""
    if isinstance(case, Gradient):
        return arrays["d_out"].astype(jnp.float32)
    return _dense_rows(arrays["lhs"], arrays.get("lhs_scale"))


def _apply_group(case: Grouped, arrays: Arrays, g: jax.Array, lhs: jax.Array) -> jax.Array:
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


def _ragged_prefill(ragged: Ragged, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    case = ragged.case
    assert isinstance(case, Prefill)
    arrays = _rounded(case, key, host)
    want = prefill_reference.mla_prefill(**_wide(arrays), **options(case))
    past = (jnp.arange(case.keys) >= arrays["lengths"][:, None])[..., None, None]
    for name in ("k", "v"):
        arrays[name] = jnp.where(past, jnp.nan, arrays[name])
    return arrays, want


# ---- samples of a timed shape --------------------------------------------------------------------


def spot(case: Case, arrays: Arrays, result: Checked) -> tuple[jax.Array, jax.Array]:
    """Returns :func:`errors` of sampled rows of a result. To be traced."""
    if isinstance(case, SparseCase):
        with jax.default_matmul_precision("highest"):
            return errors(*sparse_checks.spot(case, arrays, result))
    if isinstance(case, FeedForward):
        with jax.default_matmul_precision("highest"):
            return errors(result, (layer_inputs.exact(case, arrays), None))
    builders = {Decode: _spot_decode, Grouped: _spot_grouped, Prefill: _spot_prefill}
    with jax.default_matmul_precision("highest"):
        return errors(*builders[_kind(case)](case, arrays, result))


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
        want = [_matrix_rows(arrays, g, jnp.asarray(columns)) for g in groups]
        return (result[0][groups][:, columns], None), (jnp.stack(want), None)
    rows = np.unique(np.linspace(0, case.M - 1, 24).astype(int))
    groups = jnp.searchsorted(jnp.cumsum(arrays["group_sizes"]), rows, side="right")
    names = {"lhs", "lhs_scale", "d_out"} & set(arrays)
    lhs = _row_operand(case, {name: arrays[name][rows] for name in names})

    def one(row_and_group):
        row, g = row_and_group
        return _apply_group(case, arrays, g, row[None])[0]

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
