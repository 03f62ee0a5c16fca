"""Sends a variable number of rows to every device; returns the received rows and counts."""
