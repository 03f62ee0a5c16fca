"""Extrapolates the speed of a slice of layers to the whole model, by its roofline bound."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dsv3_jax import presets
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ModelShapes

_V3 = presets.DEEPSEEK_V3


def tokens_per_s_per_device(row: dict[str, Any]) -> float:
    """Extrapolates a result of a slice of DeepSeek-V3 to all 61 layers on as many GPUs.

    It assumes that the whole model reaches the same share of its roofline bound as the slice. The
    bound of decode is the bytes of weights and cache, that of prefill the arithmetic. The whole
    model would not fit in the memory of so few GPUs.
    """
    slice_layers = dataclasses.replace(
        _V3, num_hidden_layers=row["layers"], first_k_dense_replace=1
    )
    slowdown = _bound(row, _V3) / _bound(row, slice_layers)
    return row["tokens_per_s"] / slowdown / row["devices"]


def _bound(row: dict[str, Any], config: Any) -> float:
    """Returns the lower bound of a step's time, in seconds."""
    deployment = Deployment(
        config,
        Target.parse(f"gpu:h200x{row['devices']}"),
        row["layout"],
        row["batch"],
        row["context"],
        row["dtype"],
        row["activations"],
        prefill_chunk=row.get("chunk", 1),
    )
    shard = _shapes(config, row["dtype"]).shard(deployment.layout)
    if row["phase"] == "decode":
        decode_roofline = roofline.decode(shard, deployment)
        return decode_roofline.weights + decode_roofline.cache
    return roofline.prefill(shard, deployment).arithmetic


@functools.cache
def _shapes(config: Any, quantization: str) -> ModelShapes:
    return ModelShapes.of(config, quantization, mtp=False, redundant_experts=0)
