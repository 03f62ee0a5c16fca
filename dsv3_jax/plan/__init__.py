"""Planner: memory use and lower bounds on time for a deployment, without its devices.

:mod:`~dsv3_jax.plan.deployment` describes what is asked, :mod:`~dsv3_jax.plan.estimate` answers it.
Units are bytes, seconds, FLOP (a multiply-add counts as two) and bytes/s, unless a name or
docstring gives another. GB are 10^9 bytes.
"""
