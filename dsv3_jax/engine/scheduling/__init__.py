"""Scheduling of requests as numbers: pages, budgets and plans of steps, without JAX."""
