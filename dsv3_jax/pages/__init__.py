"""Cache pages away from the device: their addresses, their records, and where records are kept.

=============== =======================================================================
address.py      the arrays of a page, and digests of everything that its contents depend on
weights.py      a checksum of a model's arrays
record.py       a page with its header, checked when it arrives as bytes; protocols of stores
disk.py         records in a directory that several processes share
tiers.py        records in host memory, and all tiers in order
=============== =======================================================================

Records are NumPy arrays and bytes: nothing here runs on the device, except for the checksum of the
weights. :mod:`dsv3_jax.engine` copies pages between its pool and records.
"""

from dsv3_jax.pages.address import CacheIdentity, PageAddress, PageArray, PageFormat
from dsv3_jax.pages.record import PageError, PageRecord, PageSink, PageSource, TierStats
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
