"""Several processes as one machine; see :mod:`sharding.distributed`."""

from sharding.distributed import host_values, initialize

__all__ = ["host_values", "initialize"]
