"""Muon: momentum of each matrix, orthogonalised by a Newton-Schulz iteration.

As published by Keller Jordan (https://kellerjordan.github.io/posts/muon), with the scale of
Moonlight (arXiv 2502.16982, section 2.2) and Kimi-K2: the update of a matrix [n, m] is
``0.2 sqrt(max(n, m))`` times an approximately orthogonal matrix. Its root mean square is then about
0.2, as of AdamW's updates, so that learning rate and weight decay of AdamW apply.

An iteration takes ``4 k^2 l + 2 k^3`` FLOPs for a matrix with k = min(n, m) and l = max(n, m), in
the compute dtype, whatever the number of tokens. The five iterations of a step take 38 TFLOP for
each billion parameters of Moonlight's experts, as many as 6,300 tokens of training per expert.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from sharding import Layout

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in the polynomial that an iteration applies to the singular
values."""
_ITERATIONS = 5
_UPDATE_RMS = 0.2


class MuonState(NamedTuple):
    """Momentum of every matrix."""

    momentum: optax.Updates
    """Moving average of the gradient, with the shapes of the parameters."""


def scale_by_muon(dtype: jnp.dtype, layout: Layout | None) -> optax.GradientTransformation:
    """Returns the transformation of gradients to scaled orthogonal matrices.

    A parameter has the shape [n, m], or [E, n, m] for E separate matrices. Matrices of one shape
    are orthogonalised together, and those of a mesh are distributed over its devices, so that each
    device orthogonalises whole matrices of its own.

    Args:
      dtype: dtype of the Newton-Schulz iteration.
      layout: mesh layout of the model, or None for a single device.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        def average(before: Array, gradient: Array) -> Array:
            return _MOMENTUM * before + (1 - _MOMENTUM) * gradient

        momentum = jax.tree.map(average, state.momentum, updates)
        # Nesterov's momentum: the average after one more equal gradient.
        leaves, structure = jax.tree.flatten(jax.tree.map(average, momentum, updates))
        together: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            # The experts of one array are many enough. A copy of all arrays would be large.
            together[leaf.shape if leaf.ndim == 2 else (i,)].append(i)
        for group in together.values():
            matrices = [leaves[i].astype(dtype).reshape(-1, *leaves[i].shape[-2:]) for i in group]
            sharding = layout and _one_device_each(layout, leaves[group[0]].ndim == 3)
            result = orthogonalize(jnp.concatenate(matrices), sharding)
            scale = _UPDATE_RMS * math.sqrt(max(result.shape[-2:]))
            for i, matrix in zip(group, jnp.split(result, len(group)), strict=True):
                leaves[i] = scale * matrix.astype(jnp.float32).reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, leaves), MuonState(momentum)

    return optax.GradientTransformation(init, update)


def orthogonalize(
    x: Float[Array, "b n m"], sharding: NamedSharding | None = None
) -> Float[Array, "b n m"]:
    """Returns matrices with the singular vectors of ``x`` and singular values of about 1, between
    0.68 and 1.2. Those below 1/500 of the matrix' norm stay smaller, and zeros stay zeros.

    Args:
      sharding: sharding of whole matrices over devices. Each device orthogonalises its own.
    """
    count = len(x)
    if sharding is not None:
        x = jnp.pad(x, ((0, -count % sharding.num_devices), (0, 0), (0, 0)))
        x = jax.lax.with_sharding_constraint(x, sharding)
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    # The published code adds 1e-7 to the norm, which would shrink the update of small gradients.
    x = (x / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)).astype(x.dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = b * gram + c * (gram @ gram)
        x = a * x + (x @ polynomial if is_tall else polynomial @ x)
    return x[:count]


def _one_device_each(layout: Layout, are_experts: bool) -> NamedSharding:
    """Returns the sharding of matrices over all devices.

    The axes of experts come first for experts, so that a matrix stays among the devices that have
    its shards.
    """
    first = layout.mesh_axes("expert") if are_experts else ()
    axes = (*first, *(axis for axis in layout.mesh.axis_names if axis not in first))
    return NamedSharding(layout.mesh, PartitionSpec(axes))
