"""Names of exchanges and layouts, as types that can be imported without JAX."""

from __future__ import annotations

from typing import Literal

Exchange = Literal["all_gather", "all_to_all", "ragged_all_to_all", "one_sided"]
"""Collectives that move tokens to experts on other devices; see :mod:`sharding.expert_parallel`."""

LayoutName = Literal[
    "single",
    "dp_attention_ep",
    "tensor_parallel",
    "tp_attention_ep",
    "context_parallel",
    "train",
    "tpu_pod",
    "kimi_k2_ep16",
    "deepseek_prefill_ep32",
    "deepseek_decode_ep144",
]
"""Keys of :data:`sharding.presets.PRESETS`, which describes each layout."""
