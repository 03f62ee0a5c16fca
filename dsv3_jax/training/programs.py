"""The jitted functions of training, with the shardings of their arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Int

from dsv3_jax.training.losses import Losses, TargetCounts
from dsv3_jax.training.objective import Objective
from dsv3_jax.training.state import TrainingState, init_params, init_state
from dsv3_jax.training.step import training_step
from dsv3_jax.training.tree import Tree
from sharding import Layout


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
    make_params = functools.partial(init_params, config=objective.config)
    make_state = functools.partial(init_state, optimizer=optimizer)
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
        return Programs(make_params, make_state, jax.jit(step, donate_argnums=0), jax.jit(evaluate))
    assert state is not None
    batch, replicated = layout.sharding(("batch",)), layout.sharding(())
    return Programs(
        jax.jit(make_params, out_shardings=(state.params, state.biases)),
        jax.jit(make_state, donate_argnums=(0, 1), out_shardings=state),
        jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(state, frozen, batch),
            out_shardings=(state, replicated),
        ),
        jax.jit(
            evaluate, in_shardings=(state, frozen, batch, replicated), out_shardings=replicated
        ),
    )
