"""Random inputs of a case for jax, made on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.shapes import BLOCK, LATENT, PAGE, ROPE, Case, Decode, Grouped, Prefill

Arrays = dict[str, jax.Array]


def make(case: Case, seed: int) -> Arrays:
    """The arguments of the op by name, all of them used and none of them poisoned."""
    key = jax.random.key(seed, impl="rbg")  # as fast as the memory
    if isinstance(case, Decode):
        return _decode(case, key, seed)
    if isinstance(case, Grouped):
        return _grouped(case, key)
    return _prefill(case, key)


def structs(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: make(case, 0))


@functools.partial(jax.jit, static_argnums=(1, 2))  # compiled once for all sets of a shape
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def _decode(case: Decode, key: jax.Array, seed: int) -> Arrays:
    keys = jax.random.split(key, 3)
    B, T, H = case.rows, case.queries, case.heads
    per_row = -(-case.cached // PAGE)
    tables = np.random.default_rng(seed).permutation(B * per_row).reshape(B, per_row)
    return {
        "q_latent": _normal(keys[0], (B, T, H, LATENT), jnp.bfloat16),
        "q_rope": _normal(keys[1], (B, T, H, ROPE), jnp.bfloat16),
        "pages": _normal(keys[2], (B * per_row, PAGE, LATENT + ROPE), jnp.bfloat16),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "lengths": jnp.full(B, case.cached, jnp.int32),
    }


def _scale(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, 0.5, 2.0) / 64


def _grouped(case: Grouped, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 4)
    G, M, N, K = len(case.sizes), case.M, case.N, case.K
    blocks = -(-K // BLOCK)
    sizes = jnp.asarray(case.sizes, jnp.int32)
    if case.dtype in ("int8", "int4"):
        packed = K if case.dtype == "int8" else K // 2
        bits = jax.random.bits(keys[1], (G, N, packed), jnp.uint8)
        rhs = bits.astype(jnp.int8) if case.dtype == "int8" else bits
        return {
            "lhs": _normal(keys[0], (M, K), jnp.bfloat16),
            "rhs": rhs,
            "group_sizes": sizes,
            "rhs_scale": _scale(keys[2], (G, N, 1 if case.dtype == "int8" else blocks)),
        }
    dtype = jnp.float8_e4m3fn if case.dtype == "fp8" else jnp.bfloat16
    arrays = {
        "lhs": _normal(keys[0], (M, K), dtype),
        "rhs": _normal(keys[1], (G, N, K), dtype),
        "group_sizes": sizes,
    }
    if case.dtype == "fp8":
        arrays["lhs_scale"] = _scale(keys[2], (M, blocks))
        arrays["rhs_scale"] = _scale(keys[3], (G, -(-N // BLOCK), blocks))
    return arrays


def _prefill(case: Prefill, key: jax.Array) -> Arrays:
    keys = jax.random.split(key, 3)
    B, T, S, H = case.rows, case.queries, case.keys, case.heads
    return {
        "q": _normal(keys[0], (B, T, H, case.K), jnp.bfloat16),
        "k": _normal(keys[1], (B, S, H, case.K), jnp.bfloat16),
        "v": _normal(keys[2], (B, S, H, case.V), jnp.bfloat16),
        "starts": jnp.full(B, S - T, jnp.int32),
        "lengths": jnp.full(B, S, jnp.int32),
    }


def options(case: Case) -> dict:
    """The op's keywords that are no arrays."""
    if isinstance(case, Grouped):
        block = {"int8": (1, case.K), "int4": (1, BLOCK)}.get(case.dtype, (BLOCK, BLOCK))
        return {"block_shape": block}
    width = LATENT + ROPE if isinstance(case, Decode) else case.K
    return {"scale": (192 if isinstance(case, Decode) else width) ** -0.5}
