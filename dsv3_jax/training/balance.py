"""Expert load balancing: bias updates without a loss, and a small sequence-wise loss."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int

from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.training.tree import Tree


def update_bias(
    bias: Float32[Array, " E"], counts: Int[Array, " E"], speed: ArrayLike
) -> Float32[Array, " E"]:
    """Returns ``bias_e + speed * sign(mean load - load_e)``, where load_e is the number of tokens
    in the whole batch that chose expert e.

    The bias affects only the choice of experts and has no gradient (V3 report, section 2.1.2).
    """
    load = counts.astype(jnp.float32)
    return bias + speed * jnp.sign(jnp.mean(load) - load)


def update_biases(biases: Tree, counts: Int[Array, "L_moe E"], speed: ArrayLike) -> Tree:
    """Applies :func:`update_bias` to every router.

    Args:
      biases: nnx.State with one bias per router, or an empty one: routers that score with a softmax
        have no bias.
      counts: load of each expert, in the main model's MoE layers and then in the MTP layers.
    """
    flat = sorted(nnx.to_flat_state(biases), key=lambda item: (item[0][0] == "mtp", item[0][1]))
    if not flat:
        return biases
    updated = [
        (path, bias.replace(update_bias(bias.get_value(), layer_counts, speed)))
        for (path, bias), layer_counts in zip(flat, counts, strict=True)
    ]
    return nnx.from_flat_state(updated)


def imbalance(counts: Int[Array, "L E"]) -> Float32[Array, ""]:
    """Returns the maximum load divided by the mean load, averaged over layers. It is 1 for a
    perfectly balanced load, and without layers."""
    if counts.shape[0] == 0:
        return jnp.float32(1)
    load = counts.astype(jnp.float32)
    return jnp.mean(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9))


def sequence_balance(stats: RoutingStats, sequences: int) -> Float32[Array, ""]:
    """Returns ``sum_i f_i P_i`` of one MoE layer, averaged over sequences (V3 report, equations 17
    to 20).

    In a sequence of T tokens, ``f_i = E / (K T) * (number of tokens that chose expert i)``, and
    ``P_i`` is the mean over its tokens of ``s_i / sum_j s_j``. The sum is 1 if either f or P is
    uniform. Only P has a gradient, because the choice of experts is not differentiable.

    f counts the experts that the router chose, by biased scores and within the selected groups.
    Equation 18 of the report counts the K largest unbiased scores. The two are equal only without
    biases and groups.

    Args:
      stats: routing of tokens in order, one sequence after the other.
      sequences: number of sequences, all of equal length.
    """
    E, K = stats.scores.shape[-1], stats.experts.shape[-1]
    scores = stats.scores.reshape(sequences, -1, E)
    experts = stats.experts.reshape(sequences, -1)
    # Counted by comparison: on a mesh, a scatter would send every sequence to every device.
    counts = jnp.sum(experts[..., None] == jnp.arange(E), axis=1, dtype=jnp.float32)
    fractions = counts * (E / (K * scores.shape[1]))
    # All sigmoids of a token may underflow. The gradient divides by the square of this bound, which
    # does not underflow.
    shares = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-12)
    return jnp.mean(jnp.sum(fractions * jnp.mean(shares, axis=1), axis=-1))
