"""Gathering of rows: a copy of each token for each of its experts."""
