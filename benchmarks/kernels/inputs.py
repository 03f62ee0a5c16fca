"""Random inputs of a case as JAX arrays, generated on the device by one program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode.models import random_int4, random_int8
from benchmarks.kernels.shapes import (
    BLOCK,
    INDEX_COLUMNS,
    INDEX_HEADS,
    LATENT,
    PAGE,
    ROPE,
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
    page_tables,
)
from pallas_kernels import mla_prefill, quantize_latent
from pallas_kernels.sparse_index.scaled_pages import pages_of, token_bytes

Arrays = dict[str, jax.Array]
Host = dict[str, np.ndarray]


def make(case: Case, seed: int) -> Arrays:
    """Returns the op's arguments by name. No slot is unused, and none contains NaN."""
    return jax.jit(functools.partial(build, case))(random_key(seed), host(case, seed))


def random_key(seed: int) -> jax.Array:
    return jax.random.key(seed, impl="rbg")  # as fast as memory bandwidth


def host(case: Case, seed: int) -> Host:
    """Returns the integer arrays, made by NumPy, that :func:`build` takes."""
    if isinstance(case, SparseCase):
        return _sparse_host(case, seed)
    if isinstance(case, Decode):
        lengths = np.asarray(case.lengths, np.int32)
        return {"block_tables": page_tables(case, seed), "lengths": lengths}
    if isinstance(case, PrefillGradient):
        return {}
    if isinstance(case, Prefill):
        S, T, B = case.keys, case.queries, case.rows
        return {"starts": np.full(B, S - T, np.int32), "lengths": np.full(B, S, np.int32)}
    return {"group_sizes": np.asarray(case.sizes, np.int32)}


def build(case: Case, key: jax.Array, host_arrays: dict[str, Any]) -> Arrays:
    """Returns the op's arguments. To be traced. ``host_arrays`` is the result of :func:`host`."""
    host_arrays = {name: jnp.asarray(x) for name, x in host_arrays.items()}
    if isinstance(case, SparseCase):
        return _sparse(case, key, host_arrays)
    if isinstance(case, Decode):
        return _decode(case, key) | host_arrays
    if isinstance(case, Grouped):
        return _grouped(case, key) | host_arrays
    arrays = _prefill(case, key) | host_arrays
    return _with_results(case, key, arrays) if isinstance(case, PrefillGradient) else arrays


@functools.cache
def structs(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: build(case, random_key(0), host(case, 0)))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def _scale(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, 0.5, 2.0) / 64


def _decode(case: Decode, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 3)
    B, T, H = case.rows, case.queries, case.heads
    pages = sum(-(-length // PAGE) for length in case.lengths)
    cached = _normal(keys[2], (pages, PAGE, LATENT + ROPE))
    if case.dtype == "fp8":
        cached = quantize_latent(cached[..., :LATENT], cached[..., LATENT:])
    return {
        "q_latent": _normal(keys[0], (B, T, H, LATENT)),
        "q_rope": _normal(keys[1], (B, T, H, ROPE)),
        "pages": cached,
    }


def _grouped(case: Grouped, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 6)
    G, M, N, K = len(case.sizes), case.M, case.N, case.K
    blocks = -(-K // BLOCK)
    if isinstance(case, Gradient):
        other = {"rhs": (G, N, K)} if case.of == "rows" else {"lhs": (M, K)}
        shapes = {"d_out": (M, N), **other}
        return {name: _normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=False)}
    lhs = _normal(keys[0], (M, K), jnp.float8_e4m3fn if case.dtype == "fp8" else jnp.bfloat16)
    if case.dtype in ("int8", "int4"):
        if case.dtype == "int8":
            rhs = random_int8(keys[1], (G, N, K))
        else:
            rhs = random_int4(keys[1], (G, N, K // 2))
        width = 1 if case.dtype == "int8" else blocks
        return {"lhs": lhs, "rhs": rhs, "rhs_scale": _scale(keys[2], (G, N, width))}
    arrays = {"lhs": lhs}
    if case.dtype == "fp8":
        arrays["lhs_scale"] = _scale(keys[5], (M, blocks))
    for i, name in enumerate(matrices(case)):
        arrays[name] = _normal(keys[1 + i], (G, N, K), lhs.dtype)
        if case.dtype == "fp8":
            arrays[f"{name}_scale"] = _scale(keys[3 + i], (G, -(-N // BLOCK), blocks))
    return arrays


def matrices(case: Grouped) -> tuple[str, ...]:
    """Returns the op's argument names of its matrices."""
    return ("gate", "up") if isinstance(case, Swiglu) else ("rhs",)


def _prefill(case: Prefill, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 3)
    B, T, S, H = case.rows, case.queries, case.keys, case.heads
    return {
        "q": _normal(keys[0], (B, T, H, case.K)),
        "k": _normal(keys[1], (B, S, H, case.K)),
        "v": _normal(keys[2], (B, S, H, case.V)),
    }


def _with_results(case: PrefillGradient, key: jax.Array, arrays: Arrays) -> Arrays:
    """Adds attention's results, and a cotangent."""
    out, lse = mla_prefill(**arrays, **options(case))
    return arrays | {"out": out, "lse": lse, "d_out": _normal(key, out.shape)}


def options(case: Case) -> dict[str, Any]:
    """Returns the op's keyword arguments that are not arrays."""
    if isinstance(case, SparseCase):
        return _sparse_options(case)
    if isinstance(case, Grouped):
        block = {"int8": (1, case.K), "int4": (1, BLOCK)}.get(case.dtype, (BLOCK, BLOCK))
        return {"block_shape": block}
    width = LATENT + ROPE if isinstance(case, Decode) else case.K
    return {"scale": (192 if isinstance(case, Decode) else width) ** -0.5}


def _sparse_host(case: SparseCase, seed: int) -> Host:
    """Returns the arrays made by NumPy: block tables with pages in random order, and lengths."""
    if isinstance(case, TopK) or case.op == "sparse_mla_prefill":
        return {}
    per_row = -(-case.cached // PAGE)
    order = np.random.default_rng(seed).permutation(case.rows * per_row)
    arrays: Host = {"block_tables": order.reshape(case.rows, per_row).astype(np.int32)}
    if isinstance(case, Index):
        arrays["lengths"] = np.full(case.rows, case.cached, np.int32)
    return arrays


def _sparse(case: SparseCase, key: jax.Array, host_arrays: Arrays) -> Arrays:
    """Returns the op's arguments. To be traced."""
    keys = jax.random.split(key, 4)

    def normal(i: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(keys[i], shape, jnp.bfloat16).astype(dtype)

    B = case.rows
    if isinstance(case, TopK):
        return {"scores": jax.random.normal(keys[0], (B, case.columns), jnp.float32)}
    pages, T = B * -(-case.cached // PAGE), case.queries
    if isinstance(case, Index):
        scales = jax.random.uniform(keys[3], (pages, PAGE, 1), jnp.float32, 0.5, 2.0)
        index_keys = normal(2, pages, PAGE, INDEX_COLUMNS, dtype=jnp.float8_e4m3fn)
        return host_arrays | {
            "q": normal(0, B, T, INDEX_HEADS, INDEX_COLUMNS, dtype=jnp.float8_e4m3fn),
            "weights": normal(1, B, T, INDEX_HEADS, dtype=jnp.float32),
            "pages": pages_of(token_bytes(index_keys, scales)),
        }
    arrays = {
        "q_latent": normal(0, B, T, case.heads, LATENT),
        "q_rope": normal(1, B, T, case.heads, ROPE),
        "indices": _spread_indices(case, keys[3]),
    }
    if case.op == "sparse_mla_prefill":
        return arrays | {"latents": normal(2, B, case.cached, LATENT + ROPE)}
    cached = normal(2, pages, PAGE, LATENT + ROPE)
    if case.dtype == "fp8":
        cached = quantize_latent(cached[..., :LATENT], cached[..., LATENT:])
    return arrays | host_arrays | {"pages": cached}


def _spread_indices(case: SparseAttention, key: jax.Array) -> jax.Array:
    """Returns one random token of each of ``topk`` equal parts of what a query sees, [B, T, K].

    A query that sees fewer tokens has all of them, and -1.
    """
    B, T, K = case.rows, case.queries, case.topk
    visible = (case.cached - T + 1 + jnp.arange(T))[:, None]
    width = jnp.maximum(visible // K, 1)
    within = jnp.floor(jax.random.uniform(key, (B, T, K)) * width).astype(jnp.int32)
    index = jnp.arange(K) * width + jnp.minimum(within, width - 1)
    return jnp.where(index < visible, index, -1).astype(jnp.int32)


def _sparse_options(case: SparseCase) -> dict[str, Any]:
    """Returns the op's keyword arguments that are not arrays."""
    if isinstance(case, TopK):
        return {"k": case.k}
    if isinstance(case, Index):
        return {"page_size": PAGE}
    return {"scale": 192**-0.5} if isinstance(case, SparseAttention) else {}
