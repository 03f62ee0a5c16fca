"""Low-rank updates of frozen weights (LoRA, arXiv 2106.09685), added to the weights themselves.

A trained weight is ``W + (alpha / r) B A`` with W frozen, A [r, in] and B [out, r]. The sum is
computed before the model runs, so every form of the model uses it, including absorbed attention,
which splits kv_b_proj. The sum costs ``out * in * r`` multiplications per weight and step, as much
as r tokens, and a temporary array of the weight's size.

The projections of attention and of the shared experts are trained, in the MTP layers too, because
every token uses them. Routers, routed experts, norms, embedding and head are frozen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from dsv3_jax.training.tree import Tree


class LowRank(NamedTuple):
    """Update of one weight [out, in], without the factor alpha / r. float32."""

    a: Float32[Array, "r in"]
    """Initialised from a normal distribution with variance 1/in."""
    b: Float32[Array, "out r"]
    """Initialised to zero, so that the initial update is zero."""


Updates = dict[str, LowRank]
"""Updates by the weight's path in the model, joined with dots."""


def is_updated(path: tuple[Any, ...]) -> bool:
    """Returns whether the parameter at ``path`` in the model has a low-rank update."""
    projection = "self_attn" in path and str(path[-2]).endswith(("_proj", "_with_mqa"))
    return projection or "shared_experts" in path


def check_rank(weights: Tree, rank: int) -> None:
    """Checks that no update has a larger rank than its weight can have.

    Raises:
      ValueError: ``rank`` exceeds a dimension of a weight to update.
    """
    for path, weight in nnx.to_flat_state(weights):
        if is_updated(path) and rank > min(weight.shape):
            raise ValueError(
                f"lora_rank: expected at most {min(weight.shape)}, the rank of {_name(path)} "
                f"{weight.shape}, got {rank}"
            )


def init(weights: Tree, rank: int, seed: int) -> Updates:
    """Returns initial updates, which are zero."""
    flat = [(path, weight) for path, weight in nnx.to_flat_state(weights) if is_updated(path)]
    keys = jax.random.split(jax.random.key(seed), len(flat))
    updates: Updates = {}
    for key, (path, weight) in zip(keys, flat, strict=True):
        out, inputs = weight.shape
        a = jax.random.normal(key, (rank, inputs), jnp.float32) / inputs**0.5
        updates[_name(path)] = LowRank(a, jnp.zeros((out, rank), jnp.float32))
    return updates


def merge(weights: Tree, updates: Updates, factor: float) -> Tree:
    """Returns the weights plus ``factor`` times their updates. Updated weights are float32; the
    others keep their dtype."""
    merged = []
    for path, weight in nnx.to_flat_state(weights):
        if is_updated(path):
            weight = weight.replace(_sum(weight.get_value(), updates[_name(path)], factor))
        merged.append((path, weight))
    return nnx.from_flat_state(merged)


def _sum(
    weight: Float[Array, "out in"], update: LowRank, factor: float
) -> Float32[Array, "out in"]:
    # HIGHEST: the update is small, and a matmul in TF32 or bfloat16 would round it.
    product = jnp.matmul(update.b, update.a, precision=jax.lax.Precision.HIGHEST)
    return weight.astype(jnp.float32) + factor * product


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
