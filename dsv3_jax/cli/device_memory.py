"""Reports a device's lack of memory in one line instead of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def refused_if_too_large(expected: str) -> Iterator[None]:
    """Turns a device's lack of memory into a ValueError of one line.

    Args:
      expected: what should have fit, and which flags change its size.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{expected}, got: {reason:.300}") from None
