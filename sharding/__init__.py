"""Meshes: named axes of devices. Knows no model."""

from sharding.mesh import AXES, make_mesh

__all__ = ["AXES", "make_mesh"]
