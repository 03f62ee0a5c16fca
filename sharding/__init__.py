"""Meshes: named axes of devices, and what each of them splits. Knows no model."""

from sharding.mesh import AXES, make_mesh
from sharding.rules import DEFAULT_RULES, Rules

__all__ = ["AXES", "DEFAULT_RULES", "Rules", "make_mesh"]
