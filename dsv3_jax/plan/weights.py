"""One device's shard of a model's parameters, and the bytes and FLOP of a pass over tokens.

Everything is computed from the model itself, built from shapes without values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.accounting import distinct_experts
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.logical_axes import check_layout
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.parameter_path import ParameterPath
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.quantization import QUANTIZATIONS
from sharding import Layout, Placement


class ParameterShard(NamedTuple):
    """One device's shard of a parameter."""

    path: ParameterPath
    shape: tuple[int, ...]
    """Shape of the shard, not of the whole parameter."""
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by it. Norms, biases, scales and the embedding are not."""
        return self.path[-1] == "weight" and len(self.shape) > 1 and self.path[0] != "embed_tokens"

    @property
    def elements(self) -> int:
        """Number of weights. A uint8 byte holds two int4 weights."""
        return math.prod(self.shape) * (2 if self.dtype == np.uint8 else 1)


def parameter_shards(model: DeepSeekV3, layout: Layout | None) -> list[ParameterShard]:
    """Returns one device's shard of every parameter. ``model`` may be abstract.

    Raises:
      ValueError: as :func:`dsv3_jax.layers.logical_axes.parameter_shardings`.
    """
    sharding_of = {} if layout is None else stored_shardings(model, layout)
    return [
        ParameterShard(
            path,
            leaf.shape if layout is None else sharding_of[path].shard_shape(leaf.shape),
            jnp.dtype(leaf.dtype),
        )
        for path, leaf in nnx.to_flat_state(nnx.state(model))
        if isinstance(leaf, nnx.Variable)
    ]


def read_bytes(
    shards: Iterable[ParameterShard],
    *,
    tokens: int,
    local_tokens: int,
    experts_per_token: int,
    expert_slots: int,
) -> float:
    """Returns the expected number of bytes that one pass over tokens reads from these parameters.

    It reads the experts that at least one token chose, if all are equally likely, one row of the
    embedding for each local token, and everything else once.

    Args:
      tokens: tokens on all devices that share the experts.
      local_tokens: tokens on this device.
      experts_per_token: experts that a token chooses, out of ``expert_slots``.
    """
    visited = distinct_experts(expert_slots, experts_per_token, tokens) / expert_slots
    total = 0.0
    for shard in shards:
        if shard.path[0] == "embed_tokens":
            total += local_tokens * shard.shape[-1] * shard.dtype.itemsize
        else:
            total += shard.nbytes * (visited if "experts" in shard.path else 1)
    return total


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """A whole model, as shapes without values."""

    model: DeepSeekV3
    up_projections: tuple[tuple[int, ...], ...]
    """Shapes [H, N, C] and [H, V, C] of the up-projections of every layer. Decode keeps them in
    bfloat16 in addition to ``kv_b_proj``."""
    expert_slots: int
    """Expert slots per layer: the experts and their replicas."""
    placement_bytes: int
    """Size of the tables that map experts to slots, in bytes. 0 without replicas."""

    @classmethod
    def of(
        cls, config: ModelConfig, quantization: str, *, mtp: bool, redundant_experts: int
    ) -> ModelShapes:
        """Builds the shapes.

        Args:
          quantization: form of the weights, a key of ``QUANTIZATIONS``. The rest is bfloat16.
          mtp: whether the MTP layers are included.
          redundant_experts: expert replicas per layer.
        """
        if not mtp:
            config = dataclasses.replace(config, num_nextn_predict_layers=0)
        model = abstract_model(config, dtype=jnp.bfloat16, quantization=QUANTIZATIONS[quantization])
        placement_bytes, expert_slots = 0, config.n_routed_experts
        if redundant_experts:
            expert_slots += redundant_experts
            layers = len(model.moe_layers())
            placement = Placement.identity(layers, config.n_routed_experts, expert_slots)
            placement_bytes = placement.log2phy.nbytes + placement.logcnt.nbytes
            model = nnx.eval_shape(lambda model: model.place_experts(placement), model)

        def up_projections(model: DeepSeekV3) -> list[jax.Array]:
            layers = (*model.layers, *model.mtp)
            return [w for layer in layers for w in layer.self_attn.up_projections(jnp.bfloat16)]

        arrays = nnx.eval_shape(up_projections, model)
        return cls(model, tuple(w.shape for w in arrays), expert_slots, placement_bytes)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def shard(self, layout: Layout) -> ModelShard:
        """Returns one device's shard of the model.

        Raises:
          ValueError: the layout cannot shard the parameters or run the layers.
        """
        check_layout(self.config, layout, self.expert_slots)
        sharding = layout.sharding(("heads", "head_dim", "latent"))
        up_projection_bytes = sum(
            2 * math.prod(sharding.shard_shape(shape)) for shape in self.up_projections
        )
        shards = tuple(parameter_shards(self.model, layout))
        return ModelShard(self, layout, shards, up_projection_bytes)


@dataclasses.dataclass(frozen=True)
class ModelShard:
    """One device's shard of a model."""

    shapes: ModelShapes
    layout: Layout
    parameters: tuple[ParameterShard, ...]
    up_projection_bytes: int
    """Size of this device's up-projections, in bytes: see ``ModelShapes.up_projections``."""

    @property
    def weight_bytes(self) -> int:
        """Size of all parameters and placement tables, in bytes."""
        return sum(shard.nbytes for shard in self.parameters) + self.shapes.placement_bytes

    def local_batch(self, batch: int) -> int:
        """Returns the number of this device's sequences in a batch of all devices."""
        return batch // self.layout.num_shards("batch")

    def expert_group_batch(self, batch: int) -> int:
        """Returns the number of sequences on all devices whose tokens use the same expert
        weights."""
        exchange_axes = self.layout.exchange_axes
        return self.local_batch(batch) * math.prod(self.layout.mesh.shape[a] for a in exchange_axes)

    def read_bytes(self, tokens: int, local_tokens: int, *, decoding: bool) -> float:
        """Returns the expected number of bytes of weights that this device reads in one pass.

        Decode reads the up-projections instead of ``kv_b_proj``. Prefill computes no logits and
        reads no ``lm_head``.

        Args:
          tokens: tokens on all devices that share the experts.
          local_tokens: tokens on this device.
        """
        unused = "kv_b_proj" if decoding else "lm_head"
        total = read_bytes(
            (shard for shard in self.parameters if unused not in shard.path),
            tokens=tokens,
            local_tokens=local_tokens,
            experts_per_token=self.shapes.config.num_experts_per_tok,
            expert_slots=self.shapes.expert_slots,
        )
        return total + (self.up_projection_bytes if decoding else 0)

    def matmul_flop(
        self, tokens: int, local_tokens: int, *, decoding: bool, float8: bool
    ) -> tuple[float, float]:
        """Returns the FLOP of this device's matmuls with weights, in bfloat16 and in float8.

        Args:
          tokens: tokens on all devices that share the experts.
          local_tokens: tokens on this device.
          float8: whether activations are rounded to float8, where weights are float8, or int4 and
            of experts.
        """
        bfloat16_flop = float8_flop = 0.0
        config = self.shapes.config
        for shard in self.parameters:
            if not shard.is_matrix or (shard.path[0] == "lm_head" and not decoding):
                continue
            uses = local_tokens
            if "experts" in shard.path:  # tokens per expert slot
                uses = tokens * config.num_experts_per_tok / self.shapes.expert_slots
            flop = 2 * shard.elements * uses
            # Absorbed into queries and outputs, kv_b_proj costs as much as one application to the
            # tokens themselves, but the up-projections are bfloat16.
            is_absorbed = decoding and "kv_b_proj" in shard.path
            is_int4_expert = "experts" in shard.path and shard.dtype == jnp.uint8
            takes_float8 = is_int4_expert or shard.dtype == jnp.float8_e4m3fn
            if float8 and takes_float8 and not is_absorbed:
                float8_flop += flop
            else:
                bfloat16_flop += flop
        return bfloat16_flop, float8_flop


class ShardCache:
    """One device's shard of the model, by deployment.

    The shapes of a large model take seconds to compute, and its shard under a layout tenths of a
    second. A shard is computed once and kept as long as this object exists. All objects share the
    shapes of the last models.
    """

    def __init__(self) -> None:
        self._shards: dict[Hashable, ModelShard | str] = {}  # a shard, or why there is none

    def of(self, deployment: Deployment) -> ModelShard:
        """Returns one device's shard of the model.

        Raises:
          ValueError: the layout does not exist on this number of devices, cannot shard the
            parameters, cannot run its exchange, or cannot divide the batch.
        """
        layout = deployment.layout
        expert_slots = deployment.config.n_routed_experts + deployment.redundant_experts
        check_layout(deployment.config, layout, expert_slots)
        layout.check_batch(deployment.batch)
        key = _model_key(deployment), deployment.layout_name, deployment.target.devices
        if key not in self._shards:
            try:
                self._shards[key] = _shapes(*_model_key(deployment)).shard(layout)
            except ValueError as refusal:
                self._shards[key] = str(refusal)
        shard = self._shards[key]
        if isinstance(shard, str):
            raise ValueError(shard)
        # The arrays do not depend on the exchange, which the layout includes.
        return dataclasses.replace(shard, layout=layout)


def _model_key(deployment: Deployment) -> tuple[ModelConfig, str, bool, int]:
    """The settings that determine the model's arrays."""
    return (
        deployment.config,
        deployment.quantization,
        deployment.mtp,
        deployment.redundant_experts,
    )


@functools.lru_cache(maxsize=8)
def _shapes(
    config: ModelConfig, quantization: str, mtp: bool, redundant_experts: int
) -> ModelShapes:
    return ModelShapes.of(config, quantization, mtp=mtp, redundant_experts=redundant_experts)
