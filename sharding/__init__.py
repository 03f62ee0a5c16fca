"""Meshes: named axes of devices, what each of them splits, and which device gets which experts.
Knows no model."""

from sharding.eplb import balancedness, rebalance_experts
from sharding.mesh import AXES, make_mesh
from sharding.replicas import Placement, choose_replicas, physical_experts
from sharding.rules import DEFAULT_RULES, Rules

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "Placement",
    "Rules",
    "balancedness",
    "choose_replicas",
    "make_mesh",
    "physical_experts",
    "rebalance_experts",
]
