"""Scores of the lightning indexer, which selects the tokens that sparse attention reads."""
