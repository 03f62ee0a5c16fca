"""Cache of abstract models and of their shards, for comparing many deployments of a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.logical_axes import check_layout
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ModelShapes, ModelShard


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
