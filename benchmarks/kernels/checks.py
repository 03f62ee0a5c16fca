"""Whether an op is right, before it is timed: against float32 at full precision.

:func:`ragged` has small inputs with every kind of row, and NaN in all that the contract leaves
unused; :func:`spot` samples the output of a timed shape.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.inputs import Arrays, make, options
from benchmarks.kernels.shapes import BLOCK, LATENT, PAGE, ROPE, Case, Decode, Grouped, Prefill
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_prefill import reference as prefill_reference

TOLERANCE = 2 * 2.0**-8
"""Of a row's Euclidean norm: one rounding to bfloat16 of a factor, and one of the result."""

LSE_TOLERANCE = 2e-3

Checked = tuple[jax.Array, jax.Array | None]  # out, and LSE of the attentions


def rows_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """The largest of the rows' relative errors; inf where either holds what is not finite."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    difference = jnp.linalg.norm(got - want, axis=-1)
    size = jnp.linalg.norm(want, axis=-1)
    error = jnp.where(difference == 0, 0, difference / size)
    return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf), initial=0)


def lse_error(got: jax.Array, want: jax.Array) -> jax.Array:
    same = jnp.isneginf(got) & jnp.isneginf(want)
    error = jnp.where(same, 0, jnp.abs(got - want))
    return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf), initial=0)


@jax.jit
def errors(got: Checked, want: Checked) -> tuple[jax.Array, jax.Array]:
    out = rows_error(got[0], want[0])
    if got[1] is None or want[1] is None:
        return out, jnp.zeros(())
    return out, lse_error(got[1], want[1])


def verdict(got: Checked, want: Checked) -> str | None:
    """None where the result is right, else by how much it is wrong."""
    error, lse = (float(x) for x in errors(got, want))
    if error <= TOLERANCE and lse <= LSE_TOLERANCE:
        return None
    return f"wrong: relative error {error:.3g}, LSE off by {lse:.3g}"


# ---- small ragged inputs -------------------------------------------------------------------------


def ragged(case: Case, seed: int) -> tuple[Arrays, Checked, Callable[[Checked], Checked]]:
    """Arguments, what they give, and what of a result is defined."""
    build = {Decode: _ragged_decode, Grouped: _ragged_grouped, Prefill: _ragged_prefill}
    with jax.default_matmul_precision("highest"):
        return build[type(case)](case, seed)


def _all(result: Checked) -> Checked:
    return result


def _ragged_decode(case: Decode, seed: int):
    rng = np.random.default_rng(seed)
    T, H = case.queries, case.heads
    lengths = np.array([T, 0, PAGE - 1, PAGE, PAGE + 1, 1000, 4097, 300])
    B, most = len(lengths), -(-4097 // PAGE)
    small = Decode(B, most * PAGE, T, H)
    arrays = make(small, seed)
    tables = np.array(arrays["block_tables"])
    used = np.zeros((B * most, PAGE), bool)
    for b, length in enumerate(lengths):
        for page in range(most):
            held = np.clip(length - page * PAGE, 0, PAGE)
            used[tables[b, page], :held] = True
            if not held:
                tables[b, page] = rng.choice([-1, 2**30, 7])
    pages = jnp.where(jnp.asarray(used)[..., None], arrays["pages"], jnp.nan)
    arrays |= {
        "pages": pages,
        "block_tables": jnp.asarray(tables, jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
    }
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items() if x.dtype == jnp.bfloat16}
    want = jax.jit(
        lambda arrays: decode_reference.mla_decode(**arrays, **options(case)),
    )(arrays | wide)
    return arrays, want, _all


def _ragged_grouped(case: Grouped, seed: int):
    # Few rows a group and many: kernels differ.
    sizes = [(1, 0, 3, 2, 0, 4, 1, 0), (70, 0, 1, 130, 13, 0, 202, 64)][seed % 2]
    spare = 37
    arrays = make(Grouped("", (*sizes[:-1], sizes[-1] + spare), case.N, case.K, case.dtype, "both"),
                  seed)  # fmt: skip
    M = sum(sizes)
    defined = jnp.arange(M + spare)[:, None] < M
    arrays["group_sizes"] = jnp.asarray(sizes, jnp.int32)
    want = jax.jit(lambda arrays: _every_group(case, arrays))(arrays)[:M]
    for name in ("lhs", "lhs_scale"):
        if name in arrays:
            x = arrays[name]
            arrays[name] = jnp.where(defined, x, jnp.asarray(jnp.nan, x.dtype))
    return arrays, (want, None), lambda result: (result[0][:M], None)


def _every_group(case: Grouped, arrays: Arrays) -> jax.Array:
    lhs = _dense_rows(arrays["lhs"], arrays.get("lhs_scale"))
    ends = jnp.cumsum(arrays["group_sizes"])
    row = jnp.arange(len(lhs))[:, None]

    def add(g, out):
        product = lhs @ _dense_matrix(case, arrays, g).T
        inside = (row < ends[g]) & (row >= ends[g] - arrays["group_sizes"][g])
        return jnp.where(inside, product, out)

    G = len(arrays["group_sizes"])
    return jax.lax.fori_loop(0, G, add, jnp.zeros((len(lhs), case.N), jnp.float32))


def _dense_rows(lhs: jax.Array, scale: jax.Array | None) -> jax.Array:
    lhs = lhs.astype(jnp.float32)
    if scale is None:
        return lhs
    return lhs * jnp.repeat(scale, BLOCK, axis=-1)[..., : lhs.shape[-1]]


def _dense_matrix(case: Grouped, arrays: Arrays, g: jax.Array) -> jax.Array:
    """Group g's, in float32 [N, K]."""
    values = arrays["rhs"][g]
    if case.dtype == "int4":
        halves = jnp.stack([values & 15, values >> 4], axis=-1).astype(jnp.int8)
        values = jnp.where(halves < 8, halves, halves - 16).reshape(case.N, case.K)
    values = values.astype(jnp.float32)
    if "rhs_scale" not in arrays:
        return values
    scale = arrays["rhs_scale"][g]
    rows, columns = options(case)["block_shape"]
    spread = jnp.repeat(jnp.repeat(scale, rows, axis=0), columns, axis=1)
    return values * spread[: case.N, : case.K]


def _ragged_prefill(case: Prefill, seed: int):
    T, S, heads = 300, 700, 4
    arrays = make(Prefill(4, T, S, heads, case.K, case.V), seed)
    starts, lengths = jnp.asarray([0, 100, 400, 700]), jnp.asarray([300, 257, 700, 64])
    past = (jnp.arange(S) >= lengths[:, None])[..., None, None]
    arrays |= {"starts": starts.astype(jnp.int32), "lengths": lengths.astype(jnp.int32)}
    for name in ("k", "v"):
        arrays[name] = jnp.where(past, jnp.nan, arrays[name])
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items() if x.dtype == jnp.bfloat16}
    want = jax.jit(
        lambda arrays: prefill_reference.mla_prefill(**arrays, **options(case)),
    )(arrays | wide)
    return arrays, want, _all


# ---- samples of a timed shape --------------------------------------------------------------------


def spot(case: Case, arrays: Arrays, result: Checked) -> str | None:
    """As :func:`verdict`, of some rows of a result."""
    build = {Decode: _spot_decode, Grouped: _spot_grouped, Prefill: _spot_prefill}
    with jax.default_matmul_precision("highest"):
        return verdict(*jax.jit(build[type(case)], static_argnums=0)(case, arrays, result))


def _spot_decode(case: Decode, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    rows = jnp.asarray(sorted({0, case.rows // 2, case.rows - 1})[-2:])
    tables = arrays["block_tables"][rows]
    per_row = tables.shape[1]
    want = decode_reference.mla_decode(
        arrays["q_latent"][rows].astype(jnp.float32),
        arrays["q_rope"][rows].astype(jnp.float32),
        arrays["pages"][tables].reshape(-1, PAGE, LATENT + ROPE).astype(jnp.float32),
        jnp.arange(tables.size).reshape(-1, per_row),
        arrays["lengths"][rows],
        **options(case),
    )
    return (result[0][rows], None if result[1] is None else result[1][rows]), (
        want[0],
        None if result[1] is None else want[1],
    )


def _spot_grouped(case: Grouped, arrays: Arrays, result: Checked) -> tuple[Checked, Checked]:
    rows = np.unique(np.linspace(0, case.M - 1, 24).astype(int))
    groups = jnp.searchsorted(jnp.cumsum(arrays["group_sizes"]), rows, side="right")
    scale = arrays.get("lhs_scale")
    lhs = _dense_rows(arrays["lhs"][rows], None if scale is None else scale[rows])

    def one(row_and_group):
        row, g = row_and_group
        return jnp.sum(_dense_matrix(case, arrays, g) * row, axis=-1)

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
    mine = None if result[1] is None else result[1][last, queries]
    return (result[0][last, queries], mine), (out, None if mine is None else lse)
