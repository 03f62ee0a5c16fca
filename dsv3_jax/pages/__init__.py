"""Cache pages away from the device: their addresses, their records, and where records are kept.

=============== =======================================================================
format.py       the arrays of a page, and their positions in its payload
address.py      digests of everything that the contents of a page depend on
weights.py      a checksum of a model's arrays
record.py       a page with its header, checked when it arrives as bytes
source.py       protocols of stores: host memory, a disk, another process
host_memory.py  records in host memory
disk.py         records in a directory that several processes share
tiers.py        these together, in order
=============== =======================================================================

Records are NumPy arrays and bytes: nothing here runs on the device, except for the checksum of the
weights. :mod:`dsv3_jax.engine` copies pages between its pool and records.
"""

from dsv3_jax.pages.address import CacheIdentity, PageAddress
from dsv3_jax.pages.format import PageArray, PageFormat
from dsv3_jax.pages.record import PageError, PageRecord
from dsv3_jax.pages.source import PageSink, PageSource, TierStats
from dsv3_jax.pages.tiers import CacheTiers, PageTiers

__all__ = [
    "CacheIdentity",
    "CacheTiers",
    "PageAddress",
    "PageArray",
    "PageError",
    "PageFormat",
    "PageRecord",
    "PageSink",
    "PageSource",
    "PageTiers",
    "TierStats",
]
