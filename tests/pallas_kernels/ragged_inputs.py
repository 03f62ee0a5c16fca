"""Small inputs with every kind of sequence or group, and NaN in what an op must not read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import inputs
from benchmarks.kernels.calls import call_of
from benchmarks.kernels.checks import (
    Checked,
    apply_group,
    attend,
    by_head,
    comparable,
    dense_pages,
    errors,
    kind,
    matrix_rows,
    row_operand,
    unequal,
    verdict,
)
from benchmarks.kernels.inputs import Arrays, Host, options
from benchmarks.kernels.shapes import (
    INDEX_COLUMNS,
    PAGE,
    Case,
    Decode,
    Gradient,
    Grouped,
    Index,
    Prefill,
    PrefillGradient,
    SparseCase,
    TopK,
)
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_prefill import reference as prefill_reference
from pallas_kernels.sparse_index import reference as index
from pallas_kernels.sparse_index import scaled_pages
from pallas_kernels.top_k import reference as top_k_reference

# Rows per group. The average selects the kernel; quantized matrices take up to 64 on average.
_SIZES = (1, 0, 3, 2, 0, 4, 1, 0), (700, 0, 1, 130, 13, 0, 202, 64)
_SIZES_QUANTIZED = _SIZES[0], (2, 0, 1, 50, 13, 0, 16, 9), (9, 0, 1, 300, 13, 0, 60, 64)
_SPARE = 37  # rows that belong to no group
_LENGTHS = (5, 0, PAGE - 1, PAGE, PAGE + 1, 1000, 700, 300)  # cached tokens, for the indexer


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
                return _build_sparse(self.case, key, host)
        builders = {
            Decode: _ragged_decode, Grouped: _ragged_grouped, Prefill: _ragged_prefill,
            PrefillGradient: _ragged_prefill_gradient,
        }  # fmt: skip
        with jax.default_matmul_precision("highest"):
            return builders[kind(self.case)](self, key, host)

    def defined(self, result: Checked) -> Checked:
        if isinstance(self.case, SparseCase):
            return comparable(self.case, result)
        if isinstance(self.case, PrefillGradient):
            return by_head(result[0]), None
        return result[0][: self.rows], result[1]


def _sizes(case: Grouped) -> tuple[tuple[int, ...], ...]:
    return _SIZES_QUANTIZED if case.dtype in ("int8", "int4") else _SIZES


def seeds(case: Case) -> range:
    """Returns the seeds for :func:`ragged`: one, or one for each set of group sizes."""
    return range(len(_sizes(case)) if isinstance(case, Grouped) else 1)


def ragged(case: Case, seed: int) -> Ragged:
    if isinstance(case, SparseCase):
        return Ragged(*_ragged_sparse(case, seed))
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


def fault(case: Case, implementation: str, runs: int) -> str | None:
    """Returns what is wrong with an op's results on ragged inputs, or between equal runs."""
    call = call_of(case, implementation)
    for seed in seeds(case):
        small = ragged(case, seed)
        arrays, want = jax.jit(small.build)(inputs.random_key(seed), small.host)
        run = jax.jit(lambda arrays, small=small: small.defined(call(arrays)))
        first = run(arrays)
        if wrong := verdict(errors(first, want)):
            return f"{wrong} (ragged inputs {seed})"
        differences = jnp.int32(0)
        for _ in range(runs - 1):
            differences += unequal(run(arrays), first)
        if int(differences):
            return f"results differ between {runs} equal runs (ragged inputs {seed})"
    return None


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
        each = (matrix_rows(arrays, g, jnp.arange(N)) for g in range(G))
        return jnp.stack(list(each)).reshape(G, N, K)
    lhs = row_operand(case, arrays)
    ends = jnp.cumsum(arrays["group_sizes"])
    row = jnp.arange(len(lhs))[:, None]

    def add(g, out):
        inside = (row < ends[g]) & (row >= ends[g] - arrays["group_sizes"][g])
        return jnp.where(inside, apply_group(case, arrays, g, lhs), out)

    G = len(arrays["group_sizes"])
    columns = case.K if isinstance(case, Gradient) else case.N
    return jax.lax.fori_loop(0, G, add, jnp.zeros((len(lhs), columns), jnp.float32))


def _ragged_prefill(ragged: Ragged, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    case = ragged.case
    assert isinstance(case, Prefill)
    arrays = _rounded(case, key, host)
    want = prefill_reference.mla_prefill(**_wide(arrays), **options(case))
    return _poisoned(case, arrays), want


def _ragged_prefill_gradient(ragged: Ragged, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    case = ragged.case
    assert isinstance(case, PrefillGradient)
    arrays = _rounded(case, key, host)
    wide = _wide(arrays)
    rest: dict[str, Any] = {name: wide[name] for name in ("starts", "lengths")} | options(case)

    def out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return prefill_reference.mla_prefill(q, k, v, **rest)[0]

    _, vjp = jax.vjp(out, *(wide[name] for name in "qkv"))
    return _poisoned(case, arrays), (by_head(vjp(wide["d_out"])), None)


def _poisoned(case: Prefill, arrays: Arrays) -> Arrays:
    """Returns the arrays with NaN in the keys and values past a sequence's length."""
    past = (jnp.arange(case.keys) >= arrays["lengths"][:, None])[..., None, None]
    return arrays | {name: jnp.where(past, jnp.nan, arrays[name]) for name in ("k", "v")}


def _ragged_sparse(case: SparseCase, seed: int) -> tuple[SparseCase, Host]:
    """Returns a small version of a case, and its host arrays with what must not be read."""
    rng = np.random.default_rng(seed)
    if isinstance(case, TopK):
        return dataclasses.replace(case, rows=4, columns=case.k + 1500), {}
    if isinstance(case, Index):
        small = dataclasses.replace(
            case, rows=len(_LENGTHS), cached=1024, queries=min(case.queries, 5)
        )
        host = inputs.host(small, seed)
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
    return small, inputs.host(small, seed) | {"indices": indices, "used": used}


def _build_sparse(case: SparseCase, key: jax.Array, host: Host) -> tuple[Arrays, Checked]:
    """Returns the arguments, with NaN in what must not be read, and the expected result."""
    host_arrays = {name: jnp.asarray(x) for name, x in host.items()}
    used = host_arrays.pop("used", None)
    arrays = inputs.build(case, key, host_arrays) | host_arrays
    arrays = jax.lax.optimization_barrier(arrays)
    if isinstance(case, TopK):
        row = jnp.arange(case.rows)[:, None]
        scores = jnp.where(row == 1, jnp.round(arrays["scores"] * 2), arrays["scores"])  # ties
        hidden = (row >= 2) & (jnp.arange(case.columns) >= case.k - 7 * row)
        arrays = {"scores": jnp.where(hidden, -jnp.inf, scores)}
        return arrays, comparable(case, (top_k_reference.top_k(**arrays, **options(case)), None))
    assert used is not None
    if isinstance(case, Index):
        want = comparable(case, (index.blocked(**arrays, **options(case)), None))
        keys, scales = scaled_pages.split(arrays["pages"], INDEX_COLUMNS, PAGE)
        keys = jnp.where(used[..., None], keys, jnp.asarray(jnp.nan, keys.dtype))
        scales = jnp.where(used, scales, jnp.nan)[..., None]
        pages = scaled_pages.pages_of(scaled_pages.token_bytes(keys, scales))
        return arrays | {"pages": pages}, want
    want = attend(case, arrays)
    if case.op == "sparse_mla_prefill":
        latents = jnp.where(used[..., None], arrays["latents"], jnp.nan)
        return arrays | {"latents": latents}, want
    by_page = used.reshape(case.rows, -1, PAGE)
    slots = jnp.zeros(arrays["pages"].shape[:2], bool)
    slots = slots.at[arrays["block_tables"]].set(by_page)
    # In a float8 cache, 255 is NaN in all three fields of a token.
    nan = jnp.uint8(255) if case.dtype == "fp8" else jnp.asarray(jnp.nan, jnp.bfloat16)
    return arrays | {"pages": jnp.where(slots[..., None], arrays["pages"], nan)}, want
