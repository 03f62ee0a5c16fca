"""Fixtures of pages: a small format with arrays of two item sizes, and records of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dsv3_jax.pages import CacheIdentity, PageAddress, PageArray, PageFormat, PageRecord

FORMAT = PageFormat(
    4,
    (
        PageArray("layers.0.scale", 1, "float32"),
        PageArray("layers.0.latent", 6, "bfloat16"),
        PageArray("mtp.0.latent", 6, "bfloat16"),
    ),
)
IDENTITY = CacheIdentity("a model", FORMAT, lookahead=1)


def record_of(address: PageAddress, identity: CacheIdentity = IDENTITY) -> PageRecord:
    """Returns the record whose contents are random, but always the same for one address."""
    rng = np.random.default_rng(list(address.digest))
    payload = rng.integers(0, 256, identity.format.num_bytes, dtype=np.uint8)
    return PageRecord(identity.digest, address, identity.format, payload)


def arrays_of(format: PageFormat, payload: np.ndarray) -> dict[str, np.ndarray]:
    """Returns views of a payload, [rows, width] by the name of the array."""
    views, begin = {}, 0
    for array in format.arrays:
        end = begin + array.numbers(format.page_size) * array.itemsize
        values = payload[begin:end].view(np.dtype(array.dtype))
        views[array.name] = values.reshape(-1, array.width)
        begin = end
    assert begin == format.num_bytes
    return views


@pytest.fixture
def records() -> Callable[[Sequence[int]], list[PageRecord]]:
    """Returns the records of a prompt's full pages."""
    return lambda tokens: [record_of(address) for address in IDENTITY.addresses(tokens)]
