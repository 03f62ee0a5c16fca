"""Runs with several processes: the public names of :mod:`sharding.distributed`."""

from sharding.distributed import host_values, initialize

__all__ = ["host_values", "initialize"]
