"""Quantization to block-scaled float8, int8 and int4, and back."""
