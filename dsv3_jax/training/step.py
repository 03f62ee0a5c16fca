"""One training step, a pure function of the training state, and the jitted functions of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int

from dsv3_jax.training import optimizer as optimizers
from dsv3_jax.training import qk_clip
from dsv3_jax.training.losses import Losses, TargetCounts, imbalance, update_biases
from dsv3_jax.training.objective import Objective
from dsv3_jax.training.state import TrainingState, init_params, init_state, joined, split
from dsv3_jax.training.tree import Tree
from pallas_kernels.target import platform
from sharding import Layout


class Metrics(NamedTuple):
    """Metrics of one step. Losses and loads are those of the parameters before the step."""

    losses: Losses
    gradient_norm: Float32[Array, ""]
    """Global norm of the gradient before clipping."""
    learning_rate: Float32[Array, ""]
    mtp_weight: Float32[Array, ""]
    """Factor of the MTP loss in this step."""
    expert_imbalance: Float32[Array, ""]
    """Maximum load divided by mean load, averaged over MoE layers."""
    clipped_heads: Int[Array, ""]
    """Number of attention heads whose largest score exceeded ``qk_clip``, in all layers."""
    expert_load: Int[Array, "L_moe E"]
    """Number of tokens that chose each expert, in the main model's MoE layers and then in the MTP
    layers."""


def training_step(
    state: TrainingState,
    frozen: Tree | None,
    tokens: Int[Array, "B T"],
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainingState, Metrics]:
    """Updates the parameters by the gradient and the router biases by the expert loads.

    Args:
      frozen: weights that ``state.params`` are low-rank updates of, or None.
      tokens: packed documents that begin with BOS.
    """
    config = objective.config
    mtp_weight = jnp.float32(optimizers.mtp_weight(config)(state.step))
    grads, losses, (load, max_scores) = objective.gradient(
        state.params, frozen, state.biases, tokens, mtp_weight
    )
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    masters = joined(state).params
    updates, optimizer_state = optimizer.update(grads, state.optimizer, masters)
    params = optax.apply_updates(masters, updates)
    if config.qk_clip:
        params = qk_clip.clip(params, max_scores, config.qk_clip, objective.model_config)
    bias_speed = jnp.float32(optimizers.bias_update_speed(config)(state.step))
    biases = update_biases(state.biases, load, bias_speed)
    metrics = Metrics(
        losses,
        optimizers.global_norm(grads),
        jnp.float32(optimizers.learning_rate(config)(state.step)),
        mtp_weight,
        imbalance(load),
        jnp.sum(max_scores > config.qk_clip, dtype=jnp.int32),
        load,
    )
    updated = TrainingState(params, biases, optimizer_state, state.step + 1)
    return updated if state.low_bits is None else split(updated), metrics


class Programs(NamedTuple):
    """The functions that a Trainer runs. They compile once per shape of the batch."""

    init_params: Callable[[Tree, Tree], tuple[Tree, Tree]]
    """``(weights, biases) -> (params, biases)``; see :func:`~dsv3_jax.training.state.init_params`.
    It runs without jit if there is no layout."""
    init_state: Callable[[Tree, Tree], TrainingState]
    """``(params, biases) -> state``. It donates its arguments if there is a layout, and runs
    without jit otherwise."""
    step: Any
    """``(state, frozen, tokens) -> (state, metrics)``, jitted; it donates the state. See
    :func:`~dsv3_jax.training.step.training_step`."""
    evaluate: Any
    """``(state, frozen, tokens, counts) -> losses``, jitted."""


def make_programs(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    layout: Layout | None = None,
    state: TrainingState | None = None,
    frozen: Tree | None = None,
) -> Programs:
    """Returns the jitted functions of training.

    Args:
      layout: mesh layout of the model, or None for a single device.
      state: shardings of the training state, if there is a layout.
      frozen: shardings of the frozen weights, if there is a layout and ``lora_rank`` is set.
    """
    jit = functools.partial(jax.jit, compiler_options=_compiler_options())
    make_params = functools.partial(init_params, config=objective.config)
    make_state = functools.partial(init_state, config=objective.config, optimizer=optimizer)
    step = functools.partial(training_step, objective=objective, optimizer=optimizer)

    def evaluate(
        state: TrainingState,
        frozen: Tree | None,
        tokens: Int[Array, "B T"],
        counts: TargetCounts | None,
    ) -> Losses:
        return objective.losses(state.params, frozen, state.biases, tokens, counts)[0]

    if layout is None:
        # Initialisation only copies arrays, so there is nothing to compile.
        return Programs(make_params, make_state, jit(step, donate_argnums=0), jit(evaluate))
    assert state is not None
    batch, replicated = layout.sharding(("batch",)), layout.sharding(())
    return Programs(
        jax.jit(make_params, out_shardings=(state.params, state.biases)),
        jax.jit(make_state, donate_argnums=(0, 1), out_shardings=state),
        jit(
            step,
            donate_argnums=0,
            in_shardings=(state, frozen, batch),
            out_shardings=(state, replicated),
        ),
        jit(evaluate, in_shardings=(state, frozen, batch, replicated), out_shardings=replicated),
    )


def _compiler_options() -> dict[str, int | bool] | None:
    """Returns XLA's options for the programs of a step.

    A CUDA graph has the addresses of its buffers. Those of a step's results change, and XLA updates
    the graph each time, which takes longer than to launch the kernels. Without Triton's matmuls,
    compilation is shorter.
    """
    if platform() != "gpu":
        return None
    return {"xla_gpu_graph_min_graph_size": 1 << 20, "xla_gpu_enable_triton_gemm": False}
