"""Causal attention over expanded keys and values, which may differ in width."""
