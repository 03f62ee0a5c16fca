"""Low-rank updates of frozen weights (LoRA, arXiv 2106.09685), computed next to the weights.

A trained weight is ``W + (alpha / r) B A`` with W frozen, A [r, in] and B [out, r]. The model
computes ``y = W x + (alpha / r) B (A x)``. So W keeps the dtype that it is stored in, float8 and
integers with scales included, it has no gradient, and no update is rounded to W's precision. Only
absorbed attention, which splits kv_b_proj, adds up that one matrix.

The projections of attention and of the shared experts are trained, in the MTP layers too, because
every token uses them. Routers, routed experts, norms, embedding and head are frozen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.tree import Tree
from pallas_kernels.matmul import sum_dtype
from pallas_kernels.residuals import named, rounded


class LowRank(NamedTuple):
    """Update of one weight [out, in], without the factor alpha / r. float32."""

    a: Float32[Array, "r in"]
    """Initialised from a normal distribution with variance 1/in."""
    b: Float32[Array, "out r"]
    """Initialised to zero, so that the initial update is zero."""


Updates = dict[str, LowRank]
"""Updates by the weight's path in the model, joined with dots."""


def is_updated(path: tuple[Any, ...]) -> bool:
    """Returns whether the weight at ``path`` in the model has a low-rank update."""
    if path[-1] != "weight":  # a scale
        return False
    projection = "self_attn" in path and str(path[-2]).endswith(("_proj", "_with_mqa"))
    return projection or "shared_experts" in path


def check_rank(weights: Tree, rank: int) -> None:
    """Checks that no update has a larger rank than its weight can have.

    Raises:
      ValueError: ``rank`` exceeds a dimension of a weight to update.
    """
    for name, shape in _updated(weights):
        if rank > min(shape):
            raise ValueError(
                f"lora_rank: expected at most {min(shape)}, the rank of {name} {shape}, got {rank}"
            )


def init(weights: Tree, rank: int, seed: int) -> Updates:
    """Returns initial updates, which are zero."""
    updated = dict(_updated(weights))
    keys = jax.random.split(jax.random.key(seed), len(updated))
    updates: Updates = {}
    for key, (name, (out, inputs)) in zip(keys, updated.items(), strict=True):
        a = jax.random.normal(key, (rank, inputs), jnp.float32) / inputs**0.5
        updates[name] = LowRank(a, jnp.zeros((out, rank), jnp.float32))
    return updates


def _updated(weights: Tree) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields name and shape [out, in] of every weight to update."""
    for path, weight in nnx.to_flat_state(weights):
        if is_updated(path):
            out, columns = weight.shape
            # A byte holds two int4.
            yield ".".join(map(str, path)), (out, columns * (1 + (weight.dtype == jnp.uint8)))


# ---- the model with updates ----------------------------------------------------------------------


def add(model: DeepSeekV3, updates: Updates, factor: float) -> None:
    """Makes the model compute with ``factor`` times the updates added to its weights."""
    for name, update in updates.items():
        parent, attribute = _place(model, name)
        setattr(parent, attribute, UpdatedLinear(getattr(parent, attribute), update, factor))


def merge(model: DeepSeekV3, updates: Updates, factor: float) -> None:
    """Adds ``factor`` times the updates to the model's weights, in float32. The sums have the dtype
    of the weights, or the model's if they are quantised. Other quantised weights are dequantised to
    that dtype, too. The arrays themselves stay as they are; the model gets new ones."""
    for name, update in updates.items():
        parent, attribute = _place(model, name)
        linear = getattr(parent, attribute)
        dtype = model.dtype if linear.quantization else linear.weight.dtype
        linear.replace_weight(_sum(linear.dense(jnp.float32), update, factor).astype(dtype))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Weight) and module.quantization is not None:
            module.replace_weight(module.dense(model.dtype))


def _place(model: DeepSeekV3, name: str) -> tuple[Any, str]:
    """Returns the module with a linear map, and the name of its attribute, by a weight's path."""
    *path, attribute, _ = name.split(".")
    parent: Any = model
    for key in path:
        parent = parent[int(key)] if key.isdecimal() else getattr(parent, key)
    return parent, attribute


def _sum(
    weight: Float32[Array, "out in"], update: LowRank, factor: float
) -> Float32[Array, "out in"]:
    # HIGHEST: the update is small, and a matmul in TF32 or bfloat16 would round it.
    product = jnp.matmul(update.b, update.a, precision=jax.lax.Precision.HIGHEST)
    return weight + factor * product


class Factor(nnx.Variable):
    """A factor of a low-rank update. It is no ``nnx.Param``: FSDP does not shard it."""


class UpdatedLinear(Linear):
    """``y = weight x + factor lora_b (lora_a x)``, with the parameters of a :class:`Linear`."""

    def __init__(self, linear: Linear, update: LowRank, factor: float):
        self.weight, self.quantization = linear.weight, linear.quantization
        self.float8_activations = linear.float8_activations
        if linear.quantization is not None:
            self.block_shape = linear.block_shape
            setattr(self, linear.scale_name, getattr(linear, linear.scale_name))
        self.lora_a, self.lora_b = map(Factor, update)
        self.factor = factor

    def __call__(
        self, x: Float[Array, "*batch in"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch out"]:
        """See :meth:`Linear.__call__`. The update's matmuls are in the dtype of ``x``."""
        y = super().__call__(x, out_dtype)
        return _add_product(self.factor, y, x, self.lora_a[...], self.lora_b[...])

    def dense(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        """Returns the sum of weight and update, computed in float32, in ``dtype``."""
        update = LowRank(self.lora_a[...], self.lora_b[...])
        return _sum(super().dense(jnp.float32), update, self.factor).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_product(
    factor: float,
    y: Float[Array, "*batch out"],
    x: Float[Array, "*batch in"],
    a: Float32[Array, "r in"],
    b: Float32[Array, "out r"],
) -> Float[Array, "*batch out"]:
    """Returns ``y + factor b a x`` in the dtype of ``y``. Matmuls are in the dtype of ``x``, with
    sums in float32. The gradients of the factors are float32 sums that nothing rounds."""
    return _forward(factor, y, x, a, b)[0]


def _forward(
    factor: float, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    hidden = _dot("...i,ri->...r", x, a, x.dtype)
    product = _dot("...r,or->...o", hidden, factor * b, y.dtype)
    return named("matmul", rounded(y + product)), (x, named("matmul", hidden), a, b)


def _backward(
    factor: float, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    (x, hidden, a, b), f32 = saved, jnp.float32
    d_y = cotangent.astype(x.dtype)
    d_hidden = _dot("...o,or->...r", d_y, factor * b, x.dtype)
    d_b = factor * _dot("...o,...r->or", d_y, hidden, f32)
    d_a = _dot("...r,...i->ri", d_hidden, x, f32)
    return cotangent, _dot("...r,ri->...i", d_hidden, a, x.dtype), d_a, d_b


_add_product.defvjp(_forward, _backward)


def _dot(equation: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Returns a matmul in the dtype of ``x``, with float32 sums that are rounded to ``dtype``."""
    out = jnp.einsum(equation, x, y.astype(x.dtype), preferred_element_type=sum_dtype(dtype))
    return out.astype(dtype)
