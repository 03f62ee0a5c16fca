"""One training step: a pure function of a state, with everything static bound beforehand."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int

from dsv3_jax.layers.router import RouterBias
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.balance import imbalance, update_bias
from dsv3_jax.training.losses import Losses, losses

# An nnx.State. The type checker of the tests does not take that class, nor optax's name for it.
Tree = Any


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Constants of a run. Defaults of optimiser and balancing are the V3 report's (section 4.2)."""

    steps: int
    learning_rate: float
    final_learning_rate: float
    warmup_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    mtp_weight: float = 0.3
    bias_update_speed: float = 0.001
    compute_dtype: str = "bfloat16"


class TrainingState(NamedTuple):
    """All that changes from step to step."""

    params: optax.Params
    """float32 master weights."""
    biases: nnx.State
    """Every router's ``e_score_correction_bias``, float32."""
    optimizer: optax.OptState
    step: Int[Array, ""]


class Metrics(NamedTuple):
    """Of one step."""

    losses: Losses
    gradient_norm: Float32[Array, ""]
    expert_imbalance: Float32[Array, ""]


class Trainer:
    """Binds a model's structure to the pure functions ``init``, ``step`` and ``evaluate``."""

    def __init__(self, model: DeepSeekV3, config: TrainingConfig):
        self.config = config
        self.model_config = model.config
        self._graph, self._params, self._biases = nnx.split(model, nnx.Param, RouterBias)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            config.learning_rate,
            config.warmup_steps,
            config.steps,
            config.final_learning_rate,
        )
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.adamw(
                schedule,
                b1=config.betas[0],
                b2=config.betas[1],
                weight_decay=config.weight_decay,
                mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            ),
        )
        self.step = jax.jit(self._step, donate_argnums=0)
        self.evaluate = jax.jit(self._evaluate)

    def init(self) -> TrainingState:
        """The state before the first step: a copy of the model's weights, for steps donate it."""
        params, biases = jax.tree.map(jnp.copy, (self._params, self._biases))
        return TrainingState(params, biases, self._optimizer.init(params), jnp.int32(0))

    def model(self, state: TrainingState) -> DeepSeekV3:
        """The model with the state's weights, in float32."""
        return nnx.merge(self._graph, state.params, state.biases)

    def _forward(
        self, params: Tree, biases: Tree, tokens: Int[Array, "B T"]
    ) -> tuple[Float32[Array, ""], tuple[Losses, Any]]:
        dtype = jnp.dtype(self.config.compute_dtype)
        cast = jax.tree.map(lambda p: p.astype(dtype), params)
        model = nnx.merge(self._graph, cast, biases)
        logits, aux = model(tokens, return_aux=True)
        found = losses(logits, aux, tokens, self.model_config.bos_token_id)
        return found.main + self.config.mtp_weight * found.mtp, (found, aux.routing)

    def _evaluate(self, state: TrainingState, tokens: Int[Array, "B T"]) -> Losses:
        return self._forward(state.params, state.biases, tokens)[1][0]

    def _step(
        self, state: TrainingState, tokens: Int[Array, "B T"]
    ) -> tuple[TrainingState, Metrics]:
        gradient = jax.value_and_grad(self._forward, has_aux=True)
        (_, (found, routing)), grads = gradient(state.params, state.biases, tokens)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        counts = [stats.counts for stats in routing]
        biases = self._balanced(state.biases, counts)
        metrics = Metrics(found, optax.tree.norm(grads), imbalance(jnp.stack(counts)))
        return TrainingState(params, biases, optimizer, state.step + 1), metrics

    def _balanced(self, biases: Tree, counts: list[Int[Array, " E"]]) -> Tree:
        """Moves each router's bias by its layer's loads: the model's layers, then the MTP's."""
        flat = sorted(nnx.to_flat_state(biases), key=lambda item: (item[0][0] == "mtp", item[0][1]))
        speed = self.config.bias_update_speed
        moved = [
            (path, bias.replace(update_bias(bias.get_value(), load, speed)))
            for (path, bias), load in zip(flat, counts, strict=True)
        ]
        return nnx.from_flat_state(moved)
