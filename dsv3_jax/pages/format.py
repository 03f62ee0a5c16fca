"""The arrays of one cache page, and the order in which a record stores them.

A record has one contiguous payload: for each array the rows of the page, in the width that the
model caches. A row is what the array stores for a token, or has the scales of several tokens. The
pool may be wider (576 numbers are stored as 640 on a TPU) and divided over devices; a payload never
is. Engines with other layouts and platforms can therefore exchange records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  # gives NumPy the names of JAX's dtypes
import numpy as np

if TYPE_CHECKING:
    from dsv3_jax.kv_cache import CacheSpec  # imports JAX, which records do not need


@dataclasses.dataclass(frozen=True)
class PageArray:
    """One array of a page."""

    name: str
    """The layer and the name in its spec, for example ``layers.3.latent`` or ``mtp.0.latent``."""
    width: int
    """Numbers per token."""
    dtype: str
    """Name of the dtype, for example ``bfloat16``."""
    rows: int | None = None
    """Rows per page, if they are more than its tokens."""

    def numbers(self, page_size: int) -> int:
        """Returns how many numbers a page has."""
        return (self.rows or page_size) * self.width

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """The arrays of a page in the order of its payload: larger numbers come first, so that every
    array is aligned."""

    page_size: int
    """Tokens of a page on one device."""
    arrays: tuple[PageArray, ...]

    @classmethod
    def of(cls, spec: CacheSpec, page_size: int) -> PageFormat:
        """Returns the format of a model's pages."""
        arrays = [
            PageArray(
                f"{group}.{number}.{name}",
                array.width,
                np.dtype(array.dtype).name,
                array.rows(page_size) if array.is_scaled else None,
            )
            for group, layers in (("layers", spec.layers), ("mtp", spec.mtp))
            for number, layer in enumerate(layers)
            for name, array in layer.items()
        ]
        return cls(page_size, tuple(sorted(arrays, key=lambda array: -array.itemsize)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PageFormat:
        """Returns the format that :meth:`as_json` described.

        Raises:
          ValueError, TypeError, KeyError: the description has another structure.
        """
        arrays = tuple(
            PageArray(str(name), int(width), np.dtype(dtype).name, *map(int, rows))
            for name, width, dtype, *rows in value["arrays"]
        )
        return cls(int(value["page_size"]), arrays)

    def as_json(self) -> dict[str, Any]:
        """Returns a description in JSON's types."""
        arrays = [
            [array.name, array.width, array.dtype, *([array.rows] if array.rows else [])]
            for array in self.arrays
        ]
        return {"page_size": self.page_size, "arrays": arrays}

    @property
    def has_mtp(self) -> bool:
        """Whether a page has entries of the MTP layer."""
        return any(array.name.startswith("mtp.") for array in self.arrays)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of a payload."""
        return sum(array.numbers(self.page_size) * array.itemsize for array in self.arrays)

    def split(self, payload: np.ndarray) -> dict[str, np.ndarray]:
        """Returns views of a payload, [rows, width] by the name of the array."""
        views, begin = {}, 0
        for array in self.arrays:
            end = begin + array.numbers(self.page_size) * array.itemsize
            values = payload[begin:end].view(np.dtype(array.dtype))
            views[array.name] = values.reshape(-1, array.width)
            begin = end
        return views

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the payload with these arrays, the inverse of :meth:`split`.

        Raises:
          ValueError: arrays differ from the format in their names, shapes or dtypes.
        """
        expected = {a.name: ((a.rows or self.page_size, a.width), a.dtype) for a in self.arrays}
        got = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        if got != expected:
            raise ValueError(f"page: expected arrays {expected}, got {got}")
        parts = [np.ascontiguousarray(arrays[a.name]).reshape(-1) for a in self.arrays]
        return np.concatenate([part.view(np.uint8) for part in parts])
