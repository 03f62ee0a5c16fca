"""The optimizer, AdamW or Muon after clipping the norm of the gradient, and all schedules."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.muon import scale_by_muon
from dsv3_jax.training.tree import Tree
from sharding import Layout


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Returns the learning rate of each step: linear warm-up, constant, cosine decay, constant (V3
    report, section 4.2).

    Step i, counted from 0, of N warm-up steps has ``(i + 1) / N`` of the peak: a rate of 0 would
    waste the first step. The report trains the last 1.1% of its run at a third of the final
    learning rate. This schedule does not.
    """
    decay_start = max(config.warmup_steps, config.step_at(config.decay_start))
    cosine = optax.cosine_decay_schedule(
        config.learning_rate,
        max(config.step_at(config.decay_end) - decay_start, 1),
        alpha=config.final_learning_rate / config.learning_rate,
    )
    constant = optax.constant_schedule(config.learning_rate)
    if config.warmup_steps == 0:
        return optax.join_schedules([constant, cosine], [decay_start])

    def warmup(step: ArrayLike) -> Any:
        return config.learning_rate * (jnp.asarray(step) + 1) / config.warmup_steps

    return optax.join_schedules([warmup, constant, cosine], [config.warmup_steps, decay_start])


def mtp_weight(config: TrainingConfig) -> optax.Schedule:
    """Returns the factor of the MTP loss, lambda in equation 25 of the V3 report."""
    return _switch(
        config.mtp_weight, config.final_mtp_weight, config.step_at(config.mtp_weight_switch)
    )


def bias_update_speed(config: TrainingConfig) -> optax.Schedule:
    """Returns the speed of the router bias updates, gamma in section 2.1.2 of the V3 report, which
    drops to 0 towards the end of the run.

    It is 0 throughout when experts are frozen, as by low-rank updates. Router biases balance the
    load while experts train: moving a bias would only send tokens away from the experts that were
    trained for them.
    """
    speed = 0.0 if config.freezes_weights else config.bias_update_speed
    return _switch(speed, 0.0, config.step_at(config.bias_update_end))


def _switch(before: float, after: float, step: int) -> optax.Schedule:
    constant = optax.constant_schedule
    return optax.join_schedules([constant(before), constant(after)], [step])


def make_optimizer(
    config: TrainingConfig, layout: Layout | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer, after clipping the global norm of the gradient.

    AdamW is one pass over memory: XLA compiles moments and update of each array to one kernel that
    reads gradients as they come, in bfloat16 for weights in bfloat16. The global norm, summed in
    float32, is one more pass over the gradients.

    Args:
      layout: mesh layout of the model, or None for a single device.
    """
    moments_dtype = jnp.dtype(config.moments_dtype)

    def with_decay(direction: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(
            direction,
            optax.add_decayed_weights(config.weight_decay, _is_matrix),
            optax.scale_by_learning_rate(learning_rate(config)),
        )

    b1, b2 = config.betas
    optimizer = with_decay(stored_in(moments_dtype, optax.scale_by_adam(b1, b2)))
    if config.optimizer == "muon":
        direction = stored_in(moments_dtype, scale_by_muon(jnp.dtype(config.compute_dtype), layout))
        optimizer = optax.partition(
            {"adamw": optimizer, "muon": with_decay(direction)},
            lambda params: jax.tree.map_with_path(_optimizer_of, params),
        )
    return optax.chain(clip_by_global_norm(config.clip_norm), optimizer)


def global_norm(arrays: Tree) -> Float32[Array, ""]:
    """Returns the norm of all arrays together, summed in float32.

    The squares of a matrix are added over layers, element by element, before they are reduced. XLA
    compiles this to one reduction for each kind of matrix, where optax has two kernels for each
    matrix. On a mesh, matrices of one kind have the same sharding.
    """
    by_kind: dict[Any, list[jax.Array]] = collections.defaultdict(list)
    for path, array in jax.tree_util.tree_leaves_with_path(arrays):
        names = [str(getattr(key, "key", key)) for key in path]
        of_layer = len(names) > 2 and names[1].isdigit()  # in layers or mtp
        kind = tuple(names[2:] if of_layer else names), array.shape
        by_kind[kind].append(jnp.square(array.astype(jnp.float32)))
    sums = [jnp.sum(functools.reduce(jnp.add, squares)) for squares in by_kind.values()]
    return jnp.sqrt(sum(sums, jnp.float32(0)))


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scales gradients so that their :func:`global_norm` is at most ``limit``. The state is that of
    optax's function of this name."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        factor = limit / jnp.maximum(global_norm(updates), limit)  # exactly 1 below the limit
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def stored_in(
    dtype: jnp.dtype, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns the transformation with its floating-point state stored in ``dtype``. It computes
    with the state in float32, and its updates do not depend on the rounding of the new state."""

    def cast(state: Any, dtype: jnp.dtype) -> Any:
        def leaf(x: jax.Array) -> jax.Array:
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(leaf, state)

    def init(params: optax.Params) -> Any:
        return cast(transformation.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = cast(state, jnp.dtype(jnp.float32))
        updates, state = transformation.update(updates, state, params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _is_matrix(params: optax.Params) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _optimizer_of(path: tuple[Any, ...], param: Any) -> str:
    """Returns the optimizer of a parameter in a run with Muon. As in Moonlight's code, routers have
    Muon too; only vectors, embedding and head have AdamW."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    has_adamw = param.ndim == 1 or name.startswith(("embed_tokens.", "lm_head."))
    return "adamw" if has_adamw else "muon"
