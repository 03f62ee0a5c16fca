"""Random inputs of a case as JAX arrays, generated on the device by one program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.integers import random_int4, random_int8
from benchmarks.kernels import layer_inputs, sparse_inputs
from benchmarks.kernels.layer_shapes import FeedForward
from benchmarks.kernels.shapes import (
    BLOCK,
    LATENT,
    PAGE,
    ROPE,
    Case,
    Decode,
    Gradient,
    Grouped,
    Prefill,
    SparseCase,
    Swiglu,
    page_tables,
)
from pallas_kernels import quantize_latent

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
        return sparse_inputs.host(case, seed)
    if isinstance(case, FeedForward):
        return {}
    if isinstance(case, Decode):
        lengths = np.asarray(case.lengths, np.int32)
        return {"block_tables": page_tables(case, seed), "lengths": lengths}
    if isinstance(case, Prefill):
        S, T, B = case.keys, case.queries, case.rows
        return {"starts": np.full(B, S - T, np.int32), "lengths": np.full(B, S, np.int32)}
    return {"group_sizes": np.asarray(case.sizes, np.int32)}


def build(case: Case, key: jax.Array, host_arrays: dict[str, Any]) -> Arrays:
    """Returns the op's arguments. To be traced. ``host_arrays`` is the result of :func:`host`."""
    host_arrays = {name: jnp.asarray(x) for name, x in host_arrays.items()}
    if isinstance(case, SparseCase):
        return sparse_inputs.build(case, key, host_arrays)
    if isinstance(case, FeedForward):
        return layer_inputs.build(case, key)
    if isinstance(case, Decode):
        return _decode(case, key) | host_arrays
    if isinstance(case, Grouped):
        return _grouped(case, key) | host_arrays
    return _prefill(case, key) | host_arrays


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


def options(case: Case) -> dict[str, Any]:
    """Returns the op's keyword arguments that are not arrays."""
    if isinstance(case, SparseCase):
        return sparse_inputs.options(case)
    if isinstance(case, FeedForward):
        return layer_inputs.options(case)
    if isinstance(case, Grouped):
        block = {"int8": (1, case.K), "int4": (1, BLOCK)}.get(case.dtype, (BLOCK, BLOCK))
        return {"block_shape": block}
    width = LATENT + ROPE if isinstance(case, Decode) else case.K
    return {"scale": (192 if isinstance(case, Decode) else width) ** -0.5}
