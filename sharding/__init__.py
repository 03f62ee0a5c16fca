"""Meshes: named axes of devices, what each of them splits, and which device gets which experts and
which requests. Knows no model."""

from sharding.balancers import WAITS, assign_by_count, assign_decode, assign_prefill
from sharding.eplb import balancedness, rebalance_experts
from sharding.mesh import AXES, make_mesh
from sharding.replicas import Placement, choose_replicas, physical_experts
from sharding.rules import DEFAULT_RULES, Rules

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "WAITS",
    "Placement",
    "Rules",
    "assign_by_count",
    "assign_decode",
    "assign_prefill",
    "balancedness",
    "choose_replicas",
    "make_mesh",
    "physical_experts",
    "rebalance_experts",
]
