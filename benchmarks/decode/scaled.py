"""A slice's time, scaled to all layers of its model by what each has to read or to multiply."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dsv3_jax import presets
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import Shapes

_V3 = presets.DEEPSEEK_V3


def tokens_per_s_per_device(row: dict[str, Any]) -> float:
    """Of all 61 layers of DeepSeek-V3 on as many GPUs, whose memory would not hold them: if each
    reached the share of its bound that the slice of ``row`` reached. Decode is bound by the bytes
    of weights and cache, prefill by operations.
    """
    slice_layers = dataclasses.replace(
        _V3, num_hidden_layers=row["layers"], first_k_dense_replace=1
    )
    longer = _bound(row, _V3) / _bound(row, slice_layers)
    return row["tokens_per_s"] / longer / row["devices"]


def _bound(row: dict[str, Any], config: Any) -> float:
    """Seconds."""
    plan = Deployment(
        config,
        Target.parse(f"gpu:h200x{row['devices']}"),
        row["layout"],
        row["batch"],
        row["context"],
        row["dtype"],
        row["activations"],
        prefill_chunk=row.get("chunk", 1),
    )
    share = _shapes(config, row["dtype"]).on(plan.layout)
    if row["phase"] == "decode":
        found = roofline.decode(share, plan)
        return found.weights + found.cache
    return roofline.prefill(share, plan).arithmetic


@functools.cache
def _shapes(config: Any, quantization: str) -> Shapes:
    return Shapes.of(config, quantization, mtp=False, redundant_experts=0)
