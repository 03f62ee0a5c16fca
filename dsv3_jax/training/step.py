"""One training step: a pure function of a state, with everything static bound beforehand."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float32, Int, Integer

from dsv3_jax.layers.router import RouterBias
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import lora, schedule
from dsv3_jax.training.balance import imbalance, update_bias
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.layer_runners import layer_runner
from dsv3_jax.training.losses import Losses, Totals, losses, totals
from dsv3_jax.training.shardings import check_trainable, moment_shardings, weight_shardings

# An nnx.State, or LoRA's updates. The type checker of the tests does not take that class, nor
# optax's name for such trees.
Tree = Any


class TrainingState(NamedTuple):
    """All that changes from step to step."""

    params: optax.Params
    """What is trained, in float32: the master weights, or with ``lora_rank`` the low-rank updates
    of weights that the Trainer holds."""
    biases: nnx.State
    """Every router's ``e_score_correction_bias``, float32."""
    optimizer: optax.OptState
    step: Int[Array, ""]
    """Steps done."""


class Metrics(NamedTuple):
    """Of one step: the losses before it, and what it did."""

    losses: Losses
    gradient_norm: Float32[Array, ""]
    """Before clipping."""
    learning_rate: Float32[Array, ""]
    mtp_weight: Float32[Array, ""]
    expert_imbalance: Float32[Array, ""]
    """Largest load over mean load, averaged over MoE layers."""
    expert_load: Int[Array, "L_moe E"]
    """Tokens that chose each expert: the model's MoE layers, then the MTP layers."""


class Trainer:
    """Binds a model's structure to the pure functions ``init``, ``step`` and ``evaluate``.

    The loss is ``main + mtp_weight * mtp + balance_weight * balance`` (:class:`Losses`).

    A model that is laid out trains on its devices: a batch is split as its layout says, and what is
    trained, its gradients and its moments lie as its parameters do.

    Args:
      model: where training begins; its own arrays stay as they are. The trainer keeps it alive
        until the first :meth:`init` or :meth:`release`; after that only the weights that
        ``lora_rank`` freezes. A model with shapes for weights is enough for :meth:`shapes`.

    Raises:
      ValueError: the model holds float8 weights, or ``lora_rank`` is too large for one; or as
        :func:`~dsv3_jax.training.shardings.check_trainable`.
    """

    def __init__(self, model: DeepSeekV3, config: TrainingConfig):
        self.config = config
        self.model_config = model.config
        self.layout = model.layout
        _refuse_float8(nnx.state(model, nnx.Param))
        check_trainable(model)
        self._graph, weights, biases = nnx.split(model, nnx.Param, RouterBias)
        self._given_shapes = jax.eval_shape(lambda *given: given, weights, biases)
        self._given: Callable[[], DeepSeekV3 | None] = lambda: model
        self._model_reference = weakref.ref(model)
        self._learning_rate = schedule.learning_rate(config)
        self._mtp_weight = schedule.mtp_weight(config)
        self._bias_speed = schedule.bias_update_speed(config)
        self._run_layers = layer_runner(remat=config.remat, scan=config.scan_layers)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.adamw(
                self._learning_rate,
                b1=config.betas[0],
                b2=config.betas[1],
                weight_decay=config.weight_decay,
                mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            ),
        )
        # Frozen weights are an argument: a closure would compile them into the program.
        self._frozen = weights if config.lora_rank else None
        if self.layout is None:
            # Nothing to compile: arrays are copied.
            self._jitted_trained, self._jitted_fresh = self._trained, self._fresh
            self._jitted_step = jax.jit(self._step, donate_argnums=0)
            self._jitted_evaluate = jax.jit(self._evaluate)
            return
        rows, whole = self.layout.sharding(("batch",)), self.layout.sharding(())
        shardings = weight_shardings(model, weights)
        frozen = shardings if config.lora_rank else None
        self._state_shardings = state = self._shardings(shardings)
        self._jitted_trained = jax.jit(self._trained, out_shardings=(state.params, state.biases))
        self._jitted_fresh = jax.jit(self._fresh, donate_argnums=(0, 1), out_shardings=state)
        self._jitted_step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(state, frozen, rows),
            out_shardings=(state, whole),
        )
        self._jitted_evaluate = jax.jit(
            self._evaluate, in_shardings=(state, frozen, rows, whole), out_shardings=whole
        )

    def init(self) -> TrainingState:
        """Returns the state before the first step, which shares no array with the model: steps
        donate it.

        The first call lets go of the model, so that nothing but the caller keeps its weights in
        memory beside the trained ones and their two moments. Under ``jax.eval_shape`` it gives the
        state's shapes.

        Raises:
          ValueError: the model is gone, because this is not the first call and the caller has not
            kept it.
        """
        model = self._given()
        if model is None:
            raise ValueError(
                "init: expected the model that the trainer was made with, which is gone; keep a "
                "reference to it to begin a second time"
            )
        params, biases = self._jitted_trained(*nnx.state(model, nnx.Param, RouterBias))
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
            self.release()
        del model  # before the moments are made
        return self._jitted_fresh(params, biases)

    def release(self) -> None:
        """Lets go of the model, for a run that goes on from a checkpoint and needs no
        :meth:`init`."""
        self._given = self._model_reference

    def _trained(self, weights: Tree, biases: Tree) -> tuple[Tree, Tree]:
        """Makes what is trained, and copies the biases."""
        c = self.config
        if c.lora_rank:
            params = lora.init(weights, c.lora_rank, c.lora_seed)
        else:
            params = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), weights)
        return params, jax.tree.map(jnp.copy, biases)

    def _fresh(self, params: Tree, biases: Tree) -> TrainingState:
        """Adds the moments and the step's number."""
        return TrainingState(params, biases, self._optimizer.init(params), jnp.int32(0))

    def _shapes(self) -> TrainingState:
        def begin(*given: Tree) -> TrainingState:
            return self._fresh(*self._trained(*given))

        return jax.eval_shape(begin, *self._given_shapes)

    def _shardings(self, weights: Tree) -> TrainingState:
        """As the weights lie; low-rank updates, which are small, are whole on every device."""
        assert self.layout is not None
        shapes = self._shapes()
        whole: Any = self.layout.sharding(())
        low_rank = jax.tree.map(lambda _: whole, shapes.params)
        params = low_rank if self.config.lora_rank else weights
        return TrainingState(
            params,
            jax.tree.map(lambda _: whole, shapes.biases),
            moment_shardings(self._optimizer, shapes.optimizer, params, whole),
            whole,
        )

    def shapes(self) -> TrainingState:
        """The state's shapes, and where it is laid out how each array lies."""
        shapes = self._shapes()
        if self.layout is None:
            return shapes
        return jax.tree.map(
            lambda leaf, lies: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies),
            shapes,
            self._state_shardings,
        )

    def batch(self, tokens: Integer[np.ndarray, "B T"]) -> Int[Array, "B T"]:
        """A batch of the host on the devices. All processes of a run call this alike, with all of
        the batch."""
        if self.layout is None:
            return jnp.asarray(tokens)
        self._check(tokens.shape, 1)
        rows, tokens = self.layout.sharding(("batch",)), tokens.astype(np.int32)
        return jax.make_array_from_callback(tokens.shape, rows, lambda index: tokens[index])

    def step(
        self, state: TrainingState, tokens: Int[Array, "B T"]
    ) -> tuple[TrainingState, Metrics]:
        """One optimiser step on a batch; ``state`` is donated, and gone afterwards.

        Args:
          tokens: packed documents, each beginning with BOS. ``accumulate`` divides B.

        Raises:
          ValueError: another B, or rows too short for the model's MTP layers.
        """
        self._check(tokens.shape, self.config.accumulate)
        return self._jitted_step(state, self._frozen, tokens)

    def evaluate(
        self, state: TrainingState, tokens: Int[Array, "B T"], whole: Totals | None = None
    ) -> Losses:
        """The losses of a batch, all of it at once, computed as in a step.

        Args:
          whole: of several batches together; the result is then this batch's share of their
            losses.

        Raises:
          ValueError: rows too short for the model's MTP layers.
        """
        self._check(tokens.shape, 1)
        return self._jitted_evaluate(state, self._frozen, tokens, whole)

    def model(self, state: TrainingState, *, share: bool = False) -> DeepSeekV3:
        """The model with the state's weights: float32, or with low-rank updates added to the
        weights of the model that was given, in their dtype.

        Args:
          share: take the state's own arrays in place of copies. Saves memory, but the next step
            donates them, and then the model is unusable.
        """
        weights, biases = self._merged(state.params, self._frozen), state.biases
        if self.config.lora_rank:
            weights = jax.tree.map(lambda w, given: w.astype(given.dtype), weights, self._frozen)
        elif not share:
            weights = jax.tree.map(jnp.copy, weights)
        made = nnx.merge(self._graph, weights, biases if share else jax.tree.map(jnp.copy, biases))
        made.dtype = made.embed_tokens.weight.dtype
        return made

    def _check(self, shape: tuple[int, ...], parts: int) -> None:
        B, T = shape
        devices = 1 if self.layout is None else self.layout.num_shards("batch")
        if B % (parts * devices) or not B:
            each = f"accumulate, {parts}" if devices == 1 else f"{devices} devices x {parts} parts"
            raise ValueError(f"tokens: expected rows in multiples of {each}, got {B}")
        shortest = self.model_config.num_nextn_predict_layers + 2
        if shortest > T:
            raise ValueError(f"tokens: expected at least {shortest} a row, got {T}")

    def _merged(self, params: Tree, frozen: Tree | None) -> Tree:
        """All weights of the model."""
        if frozen is None:
            return params
        return lora.merge(frozen, params, self.config.lora_alpha / self.config.lora_rank)

    def _losses(
        self,
        params: Tree,
        frozen: Tree | None,
        biases: Tree,
        tokens: Int[Array, "B T"],
        batch: Totals | None = None,
    ) -> tuple[Losses, Int[Array, "L_moe E"]]:
        """The losses of a part of a batch, and its experts' loads."""
        dtype = jnp.dtype(self.config.compute_dtype)
        cast = jax.tree.map(lambda w: w.astype(dtype), self._merged(params, frozen))
        model = nnx.merge(self._graph, cast, biases)
        logits, aux = model(
            tokens,
            return_aux=True,
            mtp_hidden=self.config.mtp_hidden,
            run_layers=self._run_layers,
        )
        found = losses(logits, aux, tokens, self.model_config.bos_token_id, batch)
        loads = [stats.counts for stats in aux.routing]
        none = jnp.zeros((0, self.model_config.n_routed_experts), jnp.int32)
        return found, jnp.stack(loads) if loads else none

    def _evaluate(
        self,
        state: TrainingState,
        frozen: Tree | None,
        tokens: Int[Array, "B T"],
        whole: Totals | None,
    ) -> Losses:
        return self._losses(state.params, frozen, state.biases, tokens, whole)[0]

    def _step(
        self, state: TrainingState, frozen: Tree | None, tokens: Int[Array, "B T"]
    ) -> tuple[TrainingState, Metrics]:
        mtp_weight = jnp.float32(self._mtp_weight(state.step))
        grads, found, load = self._gradient(state, frozen, tokens, mtp_weight)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        biases = self._balanced(state.biases, load, jnp.float32(self._bias_speed(state.step)))
        metrics = Metrics(
            found,
            optax.tree.norm(grads),
            jnp.float32(self._learning_rate(state.step)),
            mtp_weight,
            imbalance(load),
            load,
        )
        return TrainingState(params, biases, optimizer, state.step + 1), metrics

    def _gradient(
        self,
        state: TrainingState,
        frozen: Tree | None,
        tokens: Int[Array, "B T"],
        mtp_weight: Float32[Array, ""],
    ) -> tuple[Tree, Losses, Int[Array, "L_moe E"]]:
        """Of the whole batch's loss, part by part; with the losses and loads."""
        c = self.config
        mtp_layers = self.model_config.num_nextn_predict_layers
        batch = totals(tokens, self.model_config.bos_token_id, mtp_layers)

        def loss(params: Tree, part: Int[Array, "B T"]):
            found, load = self._losses(params, frozen, state.biases, part, batch)
            total = found.main + mtp_weight * found.mtp + c.balance_weight * found.balance
            return total, (found, load)

        def gradient(part: Int[Array, "B T"]):
            grads, (found, load) = jax.grad(loss, has_aux=True)(state.params, part)
            return grads, found, load

        if c.accumulate == 1:
            return gradient(tokens)
        # Row i goes to part i mod n, so that rows sharded over devices stay where they are.
        parts = tokens.reshape(-1, c.accumulate, tokens.shape[1]).swapaxes(0, 1)
        zero = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, parts[0])
        )

        def add(total: Any, part: Int[Array, "B T"]):
            return jax.tree.map(jnp.add, total, gradient(part)), None

        return jax.lax.scan(add, zero, parts)[0]

    def _balanced(
        self, biases: Tree, load: Int[Array, "L_moe E"], speed: Float32[Array, ""]
    ) -> Tree:
        """Moves each router's bias by its layer's loads: the model's layers, then the MTP's."""
        flat = sorted(nnx.to_flat_state(biases), key=lambda item: (item[0][0] == "mtp", item[0][1]))
        if not flat:  # routers that score with a softmax have none
            return biases
        moved = [
            (path, bias.replace(update_bias(bias.get_value(), one, speed)))
            for (path, bias), one in zip(flat, load, strict=True)
        ]
        return nnx.from_flat_state(moved)


def _refuse_float8(weights: Tree) -> None:
    for path, weight in nnx.to_flat_state(weights):
        if weight.dtype.itemsize == 1:
            raise ValueError(
                f"expected a model in bfloat16 or float32 to train, got {weight.dtype} in "
                f"{'.'.join(map(str, path))}; load it without quantization"
            )
