"""Meshes: named axes of devices, what each of them splits, and which device gets which experts.
Knows no model."""

from sharding.eplb import balancedness, rebalance_experts
from sharding.mesh import AXES, make_mesh
from sharding.rules import DEFAULT_RULES, Rules

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "Rules",
    "balancedness",
    "make_mesh",
    "rebalance_experts",
]
