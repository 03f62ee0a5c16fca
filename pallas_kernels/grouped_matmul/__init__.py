"""Matmul of rows sorted by group with one matrix a group."""
