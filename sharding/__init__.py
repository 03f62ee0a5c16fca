"""Meshes, sharding rules and layouts, expert parallelism, expert placement and request balancing.

This package knows no model.

Names are imported on first use, so that :mod:`sharding.names` can be imported without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharding.balancers import UNASSIGNED, assign_by_count, assign_decode, assign_prefill
    from sharding.context_parallel import gather_tokens, map_balanced
    from sharding.eplb import balancedness, rebalance_experts
    from sharding.expert_mixture import weighted_sum
    from sharding.expert_parallel import (
        check_exchange,
        default_capacity,
        default_pairs_per_call,
        mix_experts,
    )
    from sharding.layout import Layout, LogicalAxes
    from sharding.mesh import MESH_AXES, abstract_mesh, make_mesh
    from sharding.names import Exchange, LayoutName
    from sharding.presets import PRESETS, Preset, abstract_layout, make_layout
    from sharding.replicas import Placement, choose_replicas, physical_experts
    from sharding.rules import DEFAULT_RULES, Rules

__all__ = [
    "DEFAULT_RULES",
    "MESH_AXES",
    "PRESETS",
    "UNASSIGNED",
    "Exchange",
    "Layout",
    "LayoutName",
    "LogicalAxes",
    "Placement",
    "Preset",
    "Rules",
    "abstract_layout",
    "abstract_mesh",
    "assign_by_count",
    "assign_decode",
    "assign_prefill",
    "balancedness",
    "check_exchange",
    "choose_replicas",
    "default_capacity",
    "default_pairs_per_call",
    "gather_tokens",
    "make_layout",
    "make_mesh",
    "map_balanced",
    "mix_experts",
    "physical_experts",
    "rebalance_experts",
    "weighted_sum",
]

# Module that defines each name.
_MODULES = {
    "DEFAULT_RULES": "sharding.rules",
    "MESH_AXES": "sharding.mesh",
    "PRESETS": "sharding.presets",
    "UNASSIGNED": "sharding.balancers",
    "Exchange": "sharding.names",
    "Layout": "sharding.layout",
    "LayoutName": "sharding.names",
    "LogicalAxes": "sharding.layout",
    "Placement": "sharding.replicas",
    "Preset": "sharding.presets",
    "Rules": "sharding.rules",
    "abstract_layout": "sharding.presets",
    "abstract_mesh": "sharding.mesh",
    "assign_by_count": "sharding.balancers",
    "assign_decode": "sharding.balancers",
    "assign_prefill": "sharding.balancers",
    "balancedness": "sharding.eplb",
    "check_exchange": "sharding.expert_parallel",
    "choose_replicas": "sharding.replicas",
    "default_capacity": "sharding.expert_parallel",
    "default_pairs_per_call": "sharding.expert_parallel",
    "gather_tokens": "sharding.context_parallel",
    "make_layout": "sharding.presets",
    "make_mesh": "sharding.mesh",
    "map_balanced": "sharding.context_parallel",
    "mix_experts": "sharding.expert_parallel",
    "physical_experts": "sharding.replicas",
    "rebalance_experts": "sharding.eplb",
    "weighted_sum": "sharding.expert_mixture",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
