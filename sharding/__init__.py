"""Meshes: named axes of devices, what each of them splits, and which device gets which experts and
which requests. Knows no model."""

from sharding.balancers import WAITS, assign_by_count, assign_decode, assign_prefill
from sharding.eplb import balancedness, rebalance_experts
from sharding.expert_parallel import (
    Exchange,
    check_exchange,
    default_capacity,
    default_pairs,
    mix_experts,
)
from sharding.layout import Axes, Layout
from sharding.mesh import AXES, abstract_mesh, make_mesh
from sharding.presets import PRESETS, Preset, abstract_layout, make_layout
from sharding.replicas import Placement, choose_replicas, physical_experts
from sharding.rules import DEFAULT_RULES, Rules

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "PRESETS",
    "WAITS",
    "Axes",
    "Exchange",
    "Layout",
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
    "default_pairs",
    "make_layout",
    "make_mesh",
    "mix_experts",
    "physical_experts",
    "rebalance_experts",
]
