"""Helpers of the tests: a NumPy oracle, and tiny checkpoints in the published format."""
