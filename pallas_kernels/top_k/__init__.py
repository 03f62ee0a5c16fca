"""Exact selection of the tokens with the largest scores."""
