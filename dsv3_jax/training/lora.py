"""Low-rank updates of frozen weights (LoRA, arXiv 2106.09685), in the space of the weights.

A trained weight is ``W + (alpha / r) B A`` with W frozen, A [r, in] and B [out, r]. The sum is
formed before the model runs, so every form of the model sees it: the absorbed one, which takes
kv_b_proj apart, as well as the expanded one. It costs ``out * in * r`` multiplications a weight and
a step, as much as r tokens do, and a temporary of the weight's size.

Trained are the projections of attention and of the shared experts, which every token passes, in
the MTP layers too. Routers, routed experts, norms, embedding and head stay as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

Tree = Any  # An nnx.State, a class that the type checker of the tests does not take.


class LowRank(NamedTuple):
    """The update of one weight [out, in], before its factor; float32."""

    a: Float32[Array, "r in"]
    """Normal with variance 1/in at first."""
    b: Float32[Array, "out r"]
    """Zero at first: training begins with the weights as they are."""


Updates = dict[str, LowRank]
"""By the weight's path in the model, joined with dots."""


def is_updated(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at ``path`` in the model receives an update."""
    projection = "self_attn" in path and str(path[-2]).endswith(("_proj", "_with_mqa"))
    return projection or "shared_experts" in path


def init(weights: Tree, rank: int, seed: int) -> Updates:
    """Updates that change nothing yet.

    Raises:
      ValueError: ``rank`` is more than a weight it should update has itself.
    """
    flat = [(path, weight) for path, weight in nnx.to_flat_state(weights) if is_updated(path)]
    keys = jax.random.split(jax.random.key(seed), len(flat))
    updates: Updates = {}
    for key, (path, weight) in zip(keys, flat, strict=True):
        out, inputs = weight.shape
        if rank > min(out, inputs):
            raise ValueError(
                f"lora_rank: expected at most {min(out, inputs)}, the rank of {_name(path)} "
                f"{weight.shape}, got {rank}"
            )
        a = jax.random.normal(key, (rank, inputs), jnp.float32) / inputs**0.5
        updates[_name(path)] = LowRank(a, jnp.zeros((out, rank), jnp.float32))
    return updates


def merge(weights: Tree, updates: Updates, factor: float) -> Tree:
    """The weights with their updates, added in float32; those with an update are float32 then."""
    merged = []
    for path, weight in nnx.to_flat_state(weights):
        if is_updated(path):
            weight = weight.replace(_sum(weight.get_value(), updates[_name(path)], factor))
        merged.append((path, weight))
    return nnx.from_flat_state(merged)


def _sum(
    weight: Float[Array, "out in"], update: LowRank, factor: float
) -> Float32[Array, "out in"]:
    # HIGHEST: the sum is small, and a product in TF32 or bfloat16 would not be exact.
    product = jnp.matmul(update.b, update.a, precision=jax.lax.Precision.HIGHEST)
    return weight.astype(jnp.float32) + factor * product


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
