"""Rows times one quantized matrix."""
