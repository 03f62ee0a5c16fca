"""Meshes, what each of their axes splits, and experts on many devices. Knows no model."""

from sharding.expert_parallel import check_exchange, default_capacity, mix_experts
from sharding.mesh import AXES, make_mesh
from sharding.rules import DEFAULT_RULES, Rules

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "Rules",
    "check_exchange",
    "default_capacity",
    "make_mesh",
    "mix_experts",
]
