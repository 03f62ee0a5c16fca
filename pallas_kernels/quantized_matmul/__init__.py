"""Matmul with one quantized matrix."""
