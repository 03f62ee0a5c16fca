"""Grouped matmul: rows sorted by group, each multiplied with its group's matrix."""
