"""The training state, everything that changes from one step to the next, and its shardings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import lora
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.drafts import is_drafter
from dsv3_jax.training.indexer import is_indexer
from dsv3_jax.training.objective import stays_float32
from dsv3_jax.training.tree import Tree, replace, select
from sharding import Layout


class TrainingState(NamedTuple):
    """Everything that changes from one step to the next. Each step donates its input state."""

    params: Tree
    """Trained parameters, float32 except where ``low_bits`` has a part of them: the master weights,
    or with ``lora_rank`` the low-rank updates of the frozen weights, which the Trainer keeps. In
    the dense stage of an indexer's training they are the indexers' weights, and with
    ``draft_depth`` those of the MTP layer."""
    biases: nnx.State
    """``e_score_correction_bias`` of every router, float32 [E] each. The load of the experts
    updates them; they have no gradient."""
    optimizer: optax.OptState
    """AdamW's two moments or Muon's momentum, in ``moments_dtype`` with the shapes of ``params``,
    and step counters."""
    step: Int[Array, ""]
    """Number of completed steps."""
    low_bits: Tree | None = None
    """int16, for the parameters that ``params`` has in bfloat16, see :func:`split`; None if there
    are none."""


def init_params(weights: Tree, biases: Tree, config: TrainingConfig) -> tuple[Tree, Tree]:
    """Returns the trained parameters and a copy of the router biases.

    The parameters are a float32 copy of the model's weights, or with ``lora_rank`` low-rank updates
    that are zero. In the dense stage of an indexer's training they are the indexers' weights, and
    with ``draft_depth`` those of the MTP layer.
    """
    if config.lora_rank:
        params = lora.init(weights, config.lora_rank, config.lora_seed)
    else:
        if config.indexer_stage == "dense":
            weights = select(weights, is_indexer)
        if config.draft_depth:
            weights = select(weights, is_drafter)
        params = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), weights)
    return params, jax.tree.map(jnp.copy, biases)


def init_state(
    params: Tree, biases: Tree, config: TrainingConfig, optimizer: optax.GradientTransformation
) -> TrainingState:
    """Returns the state before the first step, with moments that are zero."""
    state = TrainingState(params, biases, optimizer.init(params), jnp.int32(0))
    if config.compute_dtype != "bfloat16" or config.freezes_weights:
        return state
    return split(state)


def split(state: TrainingState) -> TrainingState:
    """Stores the float32 parameters whose compute dtype is bfloat16 as two halves: their bfloat16
    rounding, with which the model computes, and an int16 for the other 16 bits.

    This takes no more memory than float32, and the rounding needs no memory of its own. Rounding is
    to nearest. What is halfway between two bfloat16 numbers is rounded away from zero, so that the
    rest always fits an int16.
    """
    params = nnx.to_flat_state(state.params)
    flat = [(path, w) for path, w in params if not stays_float32(path, w.ndim)]
    high = nnx.from_flat_state([(path, w.replace(_high_bits(w[...]))) for path, w in flat])
    low = nnx.from_flat_state([(path, w.replace(_low_bits(w[...]))) for path, w in flat])
    return state._replace(params=replace(state.params, high), low_bits=low)


def joined(state: TrainingState) -> TrainingState:
    """Inverts :func:`split`, to the last bit. Any other state is returned as it is."""
    if state.low_bits is None:
        return state
    low = dict(nnx.to_flat_state(state.low_bits))
    flat = [(path, w) for path, w in nnx.to_flat_state(state.params) if path in low]
    masters = [(path, w.replace(_join(w[...], low[path][...]))) for path, w in flat]
    params = replace(state.params, nnx.from_flat_state(masters))
    return state._replace(params=params, low_bits=None)


def _high_bits(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(1 << 15)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _low_bits(x: jax.Array) -> jax.Array:
    """Returns the difference of the bits of ``x`` and of its rounding, from -2**15 to 2**15 - 1."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16)


def _join(high: jax.Array, low: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits + low.astype(jnp.uint32), jnp.float32)


def weight_shardings(model: DeepSeekV3, layout: Layout, weights: Tree) -> Tree:
    """Returns the sharding of each weight of ``model``, in a tree with the structure of
    ``weights``."""
    shardings = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    flat = nnx.to_flat_state(weights)
    return nnx.from_flat_state([(path, leaf.replace(shardings[path])) for path, leaf in flat])


def state_shardings(
    shapes: TrainingState,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    params: Tree | None,
) -> TrainingState:
    """Returns the sharding of each array in a training state.

    Each moment has the sharding of its parameter. Router biases and counters, which are small, are
    replicated.

    Args:
      shapes: abstract state.
      params: shardings of the trained parameters. None replicates them, which is meant for low-rank
        updates: they are small.
    """
    replicated: Any = layout.sharding(())
    param_shardings: Any = params
    if params is None:
        param_shardings = jax.tree.map(lambda _: replicated, shapes.params)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        # A moment is masked if another optimizer updates the parameter.
        lambda leaf, sharding: leaf if isinstance(leaf, optax.MaskedNode) else sharding,
        shapes.optimizer,
        param_shardings,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    biases, low_bits = jax.tree.map(lambda _: replicated, shapes.biases), None
    if shapes.low_bits is not None:
        paths = {path for path, _ in nnx.to_flat_state(shapes.low_bits)}
        low_bits = select(param_shardings, lambda path: path in paths)
    return TrainingState(param_shardings, biases, moments, replicated, low_bits)
