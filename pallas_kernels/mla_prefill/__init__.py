"""Expanded causal attention with distinct key and value widths."""
