"""The training objective and its gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int

from dsv3_jax.config import ModelConfig
from dsv3_jax.training import drafts, indexer, lora, qk_clip
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import separator
from dsv3_jax.training.cross_entropy import LossHead
from dsv3_jax.training.layer_runners import layer_runner
from dsv3_jax.training.losses import Losses, TargetCounts, count_targets, first_keys, losses
from dsv3_jax.training.tree import Tree, replace


def stays_float32(path: tuple[Any, ...], ndim: int) -> bool:
    """Returns whether a parameter keeps its own dtype where the others have ``compute_dtype``.

    These are all vectors (norms, and weight and bias of the indexers' layer norms), the embedding
    and the routers. The model computes with them in float32, and the gradient of each is a sum over
    tokens that nothing may round on the way: a bfloat16 sum stops growing at 256 equal terms, which
    a frequent token's row of the embedding soon exceeds. Matmuls sum the gradients of the other
    weights in float32 and round them once.
    """
    return ndim == 1 or path[0] == "embed_tokens" or "gate" in path


def compute_weights(weights: Tree, dtype: DTypeLike) -> Tree:
    """Returns the weights in the dtypes of the forward and backward pass: float32 masters stay
    float32 where :func:`stays_float32`, and frozen weights there have at least ``dtype``. Quantised
    weights stay as they are."""

    def in_dtype(path: tuple[Any, ...], w: Any) -> Any:
        if w.dtype.itemsize == 1 or str(path[-1]).startswith("weight_scale"):
            return w
        return w.astype(jnp.promote_types(w.dtype, dtype) if stays_float32(path, w.ndim) else dtype)

    flat = nnx.to_flat_state(weights)
    return nnx.from_flat_state([(path, in_dtype(path, w)) for path, w in flat])


class Observed(NamedTuple):
    """Results of a forward pass other than its losses."""

    load: Int[Array, "L_moe E"]
    """Number of tokens that chose each expert, in the main model's MoE layers and then in the MTP
    layers."""
    max_scores: Float32[Array, "L H"]
    """Largest score of each attention head, exact where it exceeds ``qk_clip``, in the main model's
    layers and then in the MTP layers. [0, H] without ``qk_clip``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """The loss ``main + mtp_weight * mtp + balance_weight * balance + indexer`` of a model, or with
    ``draft_depth`` the loss ``drafts``, as pure functions of its parameters. :class:`Losses`
    documents the terms.

    ``params`` are the trained parameters of a :class:`~dsv3_jax.training.state.TrainingState`: all
    weights of the model, its indexers or MTP layer, or low-rank updates of ``frozen`` weights.
    ``frozen`` is None if all weights are trained. It is an argument because jit would compile the
    weights of a closure into the program as constants.
    """

    graph: Any
    """Structure of the model, an ``nnx.GraphDef``."""
    model_config: ModelConfig
    config: TrainingConfig

    def weights(self, params: Tree, frozen: Tree | None) -> Tree:
        """Returns the weights of the model: the parameters themselves, or the frozen weights with
        those replaced that are trained. Low-rank updates are not added."""
        if frozen is None:
            return params
        return frozen if self.config.lora_rank else replace(frozen, params)

    @property
    def lora_factor(self) -> float:
        """Factor of low-rank updates."""
        return self.config.lora_alpha / self.config.lora_rank

    def losses(
        self,
        params: Tree,
        frozen: Tree | None,
        biases: Tree,
        tokens: Int[Array, "B T"],
        counts: TargetCounts | None = None,
    ) -> tuple[Losses, Observed]:
        """Returns the losses of a batch and the other results of its forward pass.

        The forward pass uses ``compute_dtype``; see :func:`compute_weights`.

        Args:
          counts: target counts of the whole batch if ``tokens`` is one of its microbatches.
        """
        dtype = jnp.dtype(self.config.compute_dtype)
        weights = compute_weights(self.weights(params, frozen), dtype)
        stage, divergences = self.config.indexer_stage, [jnp.float32(0)]
        run_layers = layer_runner(remat=self.config.recomputed, scan=self.config.scan_layers)
        if stage != "none":
            run_layers, divergences = indexer.run_with_divergences(run_layers, stage)
        max_scores: list[jax.Array] = []
        if self.config.qk_clip:
            run_layers, max_scores = qk_clip.run_with_max_scores(run_layers, self.config.qk_clip)
        model = nnx.merge(self.graph, weights, biases)
        model.dtype = dtype
        if self.config.lora_rank:
            lora.add(model, params, self.lora_factor)
        bos = separator(self.model_config)
        states = model.hidden_states(
            tokens,
            mtp=True,
            mtp_hidden=self.config.mtp_hidden,
            run_layers=run_layers,
            draft_depth=self.config.draft_depth or None,
            first_keys=first_keys(tokens, bos) if self.config.document_mask else None,
        )
        head = LossHead(model.lm_head, model.layout)
        counts = counts or self._counts(tokens)
        batch_losses = losses(head, states, tokens, bos, counts)
        divergence = jnp.mean(jnp.stack(divergences)) * len(tokens) / counts.sequences
        batch_losses = batch_losses._replace(indexer=divergence)
        if self.config.draft_depth:
            divergence = drafts.divergence(head, states, tokens, bos, counts.mtp)
            batch_losses = batch_losses._replace(drafts=divergence)
        loads = [stats.counts for stats in states.routing + states.mtp_routing]
        no_layers = jnp.zeros((0, self.model_config.n_routed_experts), jnp.int32)
        no_scores = jnp.zeros((0, self.model_config.num_attention_heads), jnp.float32)
        return batch_losses, Observed(
            jnp.stack(loads) if loads else no_layers,
            jnp.stack(max_scores) if max_scores else no_scores,
        )

    def gradient(
        self,
        params: Tree,
        frozen: Tree | None,
        biases: Tree,
        tokens: Int[Array, "B T"],
        mtp_weight: Float32[Array, ""],
    ) -> tuple[Tree, Losses, Observed]:
        """Returns the gradient of a batch's loss with respect to ``params``, its losses and the
        other results of the forward pass, accumulated in float32 over ``config.accumulate``
        microbatches."""
        accumulate, balance_weight = self.config.accumulate, self.config.balance_weight
        counts = self._counts(tokens)

        def loss(params: Tree, microbatch: Int[Array, "B T"]):
            terms, observed = self.losses(params, frozen, biases, microbatch, counts)
            total = terms.main + mtp_weight * terms.mtp + balance_weight * terms.balance
            # In the dense stage, the other terms are constants to the indexers.
            total = terms.indexer if self.config.indexer_stage == "dense" else total + terms.indexer
            return terms.drafts if self.config.draft_depth else total, (terms, observed)

        def gradient(microbatch: Int[Array, "B T"]):
            grads, (terms, observed) = jax.grad(loss, has_aux=True)(params, microbatch)
            return grads, terms, observed

        if accumulate == 1:
            return gradient(tokens)
        # Sequence i goes to microbatch i mod n, so that sequences stay on their device.
        microbatches = tokens.reshape(-1, accumulate, tokens.shape[1]).swapaxes(0, 1)

        def zeros_like(s: jax.ShapeDtypeStruct) -> jax.Array:
            is_half = s.dtype == jnp.bfloat16
            return jnp.zeros(s.shape, jnp.float32 if is_half else s.dtype)

        zeros = jax.tree.map(zeros_like, jax.eval_shape(gradient, microbatches[0]))

        def add(total: Any, microbatch: Int[Array, "B T"]):
            of_microbatch = gradient(microbatch)
            *sums, observed = jax.tree.map(jnp.add, total, of_microbatch)
            max_scores = jnp.maximum(total[-1].max_scores, of_microbatch[-1].max_scores)
            return (*sums, observed._replace(max_scores=max_scores)), None

        return jax.lax.scan(add, zeros, microbatches)[0]

    def _counts(self, tokens: Int[Array, "B T"]) -> TargetCounts:
        mtp_layers = self.model_config.num_nextn_predict_layers
        predictions = self.config.mtp_predictions(mtp_layers)
        return count_targets(tokens, separator(self.model_config), predictions)
