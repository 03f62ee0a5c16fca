"""Rows to other devices, as many as there are for each, and how many came."""
