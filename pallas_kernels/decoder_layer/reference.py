"""feed_forward as the model's own operations, one after the other, and the formats of its weights.

A matrix is floating point, float8 with a float32 scale for each block of 128x128, int8 with a scale
for each row, or int4 with a scale for 128 columns of a row. The dtype identifies the format: int4
is stored as uint8, two columns in a byte, the even column in the low half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num

from pallas_kernels.block_quant.reference import block_dequant, scale_shape
from pallas_kernels.grouped_swiglu.reference import silu_multiply
from pallas_kernels.hopper.split_kv import Parts
from pallas_kernels.rms_norm import reference as rms_norm
from pallas_kernels.route import reference as route
from pallas_kernels.route.reference import Rule

SCALE_BLOCK = 128
"""Columns that share a scale of a float8 or an int4 matrix; also rows of a float8 matrix."""

_INT8, _INT4 = jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)


def is_integer(dtype: Any) -> bool:
    """Returns whether a dtype is that of int8 or int4 matrices."""
    return jnp.dtype(dtype) in (_INT8, _INT4)


def columns_per_element(dtype: Any) -> int:
    """Returns the number of a matrix' columns in one stored element."""
    return 2 if jnp.dtype(dtype) == _INT4 else 1


def shape_of(matrix: Any) -> tuple[int, ...]:
    """Returns the logical shape of a matrix, or of a stack of them."""
    *rows, stored = matrix.shape
    return (*rows, stored * columns_per_element(matrix.dtype))


def scale_block(matrix: Any) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, for a matrix that has scales."""
    dtype = jnp.dtype(matrix.dtype)
    if dtype == _INT8:
        return 1, shape_of(matrix)[-1]
    return 1 if dtype == _INT4 else SCALE_BLOCK, SCALE_BLOCK


def scales_shape(matrix: Any) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix, or of a stack of them."""
    return scale_shape(shape_of(matrix), scale_block(matrix))


class Matrices(NamedTuple):
    """Gate, up and down projections: single matrices, or stacks of them."""

    gate: Num[Array, "*E F D"]
    up: Num[Array, "*E F D"]
    down: Num[Array, "*E D F"]
    scales: tuple[Float32[Array, "*E rows columns"], ...] = ()
    """Scales of each if they are float8 or integers, in the blocks of their format."""


class Projection(NamedTuple):
    """A linear projection, such as attention's output projection, as in :class:`Matrices`."""

    weight: Num[Array, "N K"]
    scales: tuple[Float32[Array, "rows columns"], ...] = ()


class Router(NamedTuple):
    """The router of an MoE layer."""

    weight: Float[Array, "E D"]
    bias: Float32[Array, " E"] | None


class Chosen(NamedTuple):
    """Routing of each token, as in :class:`pallas_kernels.Routes`."""

    scores: Float32[Array, "M E"]
    experts: Int[Array, "M K"]
    weights: Float32[Array, "M K"]


def feed_forward(
    h: Float[Array, "M D"],
    norm: Float[Array, " D"],
    router: Router | None,
    shared: Matrices | None,
    routed: Matrices | None,
    *,
    rule: Rule | None,
    eps: float,
    attended: Float[Array, "M _"] | Parts | None = None,
    o_proj: Projection | None = None,
    w_uv: Float[Array, "H V C"] | None = None,
    counter: Any = None,
) -> tuple[Float[Array, "M D"], Chosen | None]:
    """Implements :func:`pallas_kernels.feed_forward`."""
    del counter
    if isinstance(attended, Parts):
        assert w_uv is not None
        rows = len(h) // len(attended.out) * len(w_uv)
        attended = attended.merged()[:, :rows].reshape(len(h), -1)
    if attended is not None:
        if w_uv is not None:
            latents = attended.reshape(len(h), len(w_uv), -1)
            # XLA's CPU compiler refuses this matmul in bfloat16 unless the matrix comes first.
            values = jnp.einsum("hvc,mhc->mhv", w_uv, latents, preferred_element_type=jnp.float32)
            attended = values.reshape(len(h), -1).astype(h.dtype)
        h = add_attended(h, attended, o_proj)
    x = rms_norm.rms_norm(h, norm, eps=eps)
    chosen = None if router is None or rule is None else choose(x, router, rule)
    total = mix(x, chosen, shared, routed).astype(h.dtype)
    return (_f32(h) + _f32(total)).astype(h.dtype), chosen


def add_attended(
    h: Float[Array, "M D"], attended: Float[Array, "M _"], o_proj: Projection | None
) -> Float[Array, "M D"]:
    """Adds attention's output to the residual."""
    if o_proj is not None:
        attended = multiply(attended, o_proj.weight, o_proj.scales).astype(h.dtype)
    return (_f32(h) + _f32(attended)).astype(h.dtype)


def choose(x: Float[Array, "M D"], router: Router, rule: Rule) -> Chosen:
    """Chooses the experts of normed tokens. The logits are float32."""
    operands = (
        (x, router.weight) if x.dtype == router.weight.dtype else (_f32(x), _f32(router.weight))
    )
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum(
        "md,ed->me", *operands, precision=highest, preferred_element_type=jnp.float32
    )
    routes = route.route(logits, router.bias, None, rule=rule)
    return Chosen(routes.scores, routes.experts, routes.weights)


def mix(
    x: Float[Array, "M D"], chosen: Chosen | None, shared: Matrices | None, routed: Matrices | None
) -> Float32[Array, "M D"]:
    """Returns the sum of the shared MLP and of the chosen experts, times their weights."""
    total = jnp.zeros(x.shape, jnp.float32)
    if chosen is not None and routed is not None:
        tokens, K = chosen.experts.shape
        pairs = jnp.repeat(jnp.arange(tokens), K), chosen.experts.reshape(-1)
        out = jax.lax.map(lambda pair: mlp(x[pair[0]][None], routed, pair[1])[0], pairs)
        out = out.reshape(tokens, K, -1).astype(x.dtype).astype(jnp.float32)
        highest = jax.lax.Precision.HIGHEST
        total = jnp.einsum("mkd,mk->md", out, chosen.weights, precision=highest)
    if shared is not None:
        total += mlp(x, shared)
    return total


def mlp(
    x: Float[Array, "M D"], matrices: Matrices, expert: Int[Array, ""] | None = None
) -> Float32[Array, "M D"]:
    """Returns ``down (silu(gate x) * up x)``, with the results of gate and up in x's dtype; of an
    ``expert`` of the stacks, or of single matrices."""

    def matmul(x: Float[Array, "M K"], n: int) -> Float32[Array, "M N"]:
        arrays: Any = matrices[n], *(scales[n] for scales in [matrices.scales] if scales)
        weight, *scale = arrays if expert is None else [array[expert] for array in arrays]
        return multiply(x, weight, scale)

    gate, up = (matmul(x, n).astype(x.dtype) for n in (0, 1))
    return matmul(silu_multiply(gate, up).astype(x.dtype), 2)


def multiply(
    x: Float[Array, "M K"], weight: Num[Array, "N stored"], scales: Sequence[Array]
) -> Float32[Array, "M N"]:
    """Returns ``W x``; a matrix W of float8 or integers has scales."""
    if scales:
        weight = block_dequant(weight, scales[0], scale_block(weight), x.dtype)
    return jnp.einsum("mk,nk->mn", x, weight, preferred_element_type=jnp.float32)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
