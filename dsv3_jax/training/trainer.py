"""The Trainer: binds a model's structure and a configuration to the functions of training."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Int, Integer

from dsv3_jax import compile_cache
from dsv3_jax.compile_cache import CompileProgress
from dsv3_jax.layers.router import RouterBias
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import lora
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.losses import Losses, TargetCounts
from dsv3_jax.training.objective import Objective
from dsv3_jax.training.optimizer import make_optimizer
from dsv3_jax.training.state import (
    TrainingState,
    init_params,
    init_state,
    joined,
    state_shardings,
    weight_shardings,
)
from dsv3_jax.training.step import Metrics, make_programs
from dsv3_jax.training.trainable import check_drafts, check_indexers, check_trainable
from dsv3_jax.training.tree import Tree


class Trainer:
    """Initialises, updates and evaluates the training state of a model.

    A model with a layout trains on the devices of its mesh. Batches are sharded as the layout
    prescribes. Parameters, gradients and moments have the shardings of the model's parameters.

    Args:
      model: initial model. Its arrays are not modified. The trainer keeps it alive until the first
        :meth:`init` or until :meth:`release_model`. Afterwards the trainer keeps only the weights
        that the configuration freezes. An abstract model is enough for ``abstract_state``.

    Attributes:
      config: the training configuration.
      model_config: the model's configuration.
      layout: mesh layout of the model, or None.
      abstract_state: shapes and dtypes of the training state, and with a layout its shardings.
      programs: the jitted functions.

    Raises:
      ValueError: ``lora_rank`` exceeds the rank of a weight, or :func:`check_trainable`,
        :func:`check_drafts` or :func:`check_indexers` refuses the model.
    """

    def __init__(self, model: DeepSeekV3, config: TrainingConfig):
        check_trainable(model, config)
        check_drafts(model, config)
        check_indexers(model, config)
        compile_cache.enable()
        self.config = config
        self.model_config = model.config
        self.layout = model.layout
        graph, weights, biases = nnx.split(model, nnx.Param, RouterBias)
        lora.check_rank(weights, config.lora_rank)
        self._objective = Objective(graph, model.config, config)
        self._frozen = weights if config.freezes_weights else None
        self._model: DeepSeekV3 | None = model
        self._model_reference = weakref.ref(model)
        self._compiled: set[tuple[int, ...]] = set()  # shapes of batches

        optimizer = make_optimizer(config, self.layout)
        shapes = jax.eval_shape(
            lambda w, b: init_state(*init_params(w, b, config), config, optimizer), weights, biases
        )
        if self.layout is None:
            self.abstract_state = shapes
            self._abstract_frozen = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._frozen
            )
            self.programs = make_programs(self._objective, optimizer)
            return
        params, frozen = weight_shardings(model, self.layout, weights), None
        if config.freezes_weights:
            params, frozen = None, params
        shardings = state_shardings(shapes, optimizer, self.layout, params)
        self.abstract_state = _with_shardings(shapes, shardings)
        self._abstract_frozen = _with_shardings(self._frozen, frozen)
        self.programs = make_programs(self._objective, optimizer, self.layout, shardings, frozen)

    @property
    def updates(self) -> lora.Updates | None:
        """Shapes of the low-rank updates, or None if there are none."""
        return self.abstract_state.params if self.config.lora_rank else None

    def step_shapes(
        self, batch: int, length: int
    ) -> tuple[TrainingState, Tree | None, jax.ShapeDtypeStruct]:
        """Returns the arguments of ``programs.step`` as shapes, with shardings if there is a
        layout."""
        sharding = None if self.layout is None else self.layout.sharding(("batch",))
        tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=sharding)
        return self.abstract_state, self._abstract_frozen, tokens

    def init(self) -> TrainingState:
        """Returns the state before the first step. It shares no array with the model, because steps
        donate it.

        The first call releases the model. Unless the caller keeps it, the trained parameters and
        their two moments are then the only arrays in memory. Under ``jax.eval_shape`` the result is
        the abstract state, and the model is not released.

        Raises:
          ValueError: the model was released and nothing else has kept it alive.
        """
        model = self._model_reference()
        if model is None:
            raise ValueError(
                "init: expected the model that the trainer was made with, but it no longer exists; "
                "keep a reference to it to initialise a second time"
            )
        params, biases = self.programs.init_params(*nnx.state(model, nnx.Param, RouterBias))
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
            self.release_model()
        del model  # before the moments are allocated
        return self.programs.init_state(params, biases)

    def release_model(self) -> None:
        """Drops the reference to the initial model. A run that resumes from a checkpoint calls this
        in place of :meth:`init`."""
        self._model = None

    def shard_batch(self, tokens: Integer[np.ndarray, "B T"]) -> Int[Array, "B T"]:
        """Transfers a batch from the host to the devices. All processes of a run call this
        together, each with the whole batch."""
        if self.layout is None:
            return jnp.asarray(tokens)
        self._check_batch(tokens.shape, 1)
        sharding, tokens = self.layout.sharding(("batch",)), tokens.astype(np.int32)
        return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])

    def step(
        self, state: TrainingState, tokens: Int[Array, "B T"]
    ) -> tuple[TrainingState, Metrics]:
        """Performs one optimizer step on a batch and returns the new state. ``state`` is donated
        and cannot be used afterwards.

        Args:
          tokens: packed documents that begin with BOS.

        Raises:
          ValueError: ``accumulate`` times the number of devices in the batch axis does not divide
            B, or T is too small for the MTP layers.
        """
        self._check_batch(tokens.shape, self.config.accumulate)
        if tokens.shape in self._compiled:
            return self.programs.step(state, self._frozen, tokens)
        with CompileProgress(1):
            result = self.programs.step(state, self._frozen, tokens)
        self._compiled.add(tokens.shape)
        return result

    def evaluate(
        self, state: TrainingState, tokens: Int[Array, "B T"], counts: TargetCounts | None = None
    ) -> Losses:
        """Returns the losses of a batch without updating the state. The batch is not divided into
        microbatches.

        Args:
          counts: target counts of several batches together. The result is then the contribution of
            this batch to their losses.

        Raises:
          ValueError: the number of devices in the batch axis does not divide B, or T is too small
            for the MTP layers.
        """
        self._check_batch(tokens.shape, 1)
        return self.programs.evaluate(state, self._frozen, tokens, counts)

    def model(self, state: TrainingState, *, copy: bool = True) -> DeepSeekV3:
        """Returns the model with the weights of a state. They are float32, or if weights are frozen
        the initial weights with the trained ones or their updates, in the initial model's dtype. A
        quantised model is dequantised, so that its updates are not rounded to its few bits.

        Args:
          copy: whether to copy the arrays of the state. Without copies the model needs no memory of
            its own, but the next step donates its arrays, and the model is then unusable.
        """
        params, biases = joined(state).params, state.biases
        weights = self._objective.weights(params, self._frozen)
        if self.config.freezes_weights:
            weights = jax.tree.map(lambda w, frozen: w.astype(frozen.dtype), weights, self._frozen)
        elif copy:
            weights = jax.tree.map(jnp.copy, weights)
        if copy:
            biases = jax.tree.map(jnp.copy, biases)
        model = nnx.merge(self._objective.graph, weights, biases)
        if self.config.lora_rank:
            lora.merge(model, state.params, self._objective.lora_factor)
        if not self.config.freezes_weights:
            model.dtype = jnp.dtype(jnp.float32)
        return model

    def _check_batch(self, shape: tuple[int, ...], microbatches: int) -> None:
        B, T = shape
        devices = 1 if self.layout is None else self.layout.num_shards("batch")
        if B % (microbatches * devices) or not B:
            factors = [f"{devices} devices"] if devices > 1 else []
            if microbatches > 1 or not factors:
                factors.append(f"accumulate={microbatches}")
            raise ValueError(
                f"tokens: expected a batch size in multiples of {' x '.join(factors)}, got {B}"
            )
        mtp_layers = self.model_config.num_nextn_predict_layers
        shortest = self.config.mtp_predictions(mtp_layers) + 2
        if shortest > T:
            raise ValueError(f"tokens: expected sequences of at least {shortest} tokens, got {T}")


def _with_shardings(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        arrays,
        shardings,
    )
