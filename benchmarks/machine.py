"""The machine of a measurement: its description, and the bandwidth that is 100 % of its peak."""

from __future__ import annotations

import datetime
import platform
import re
from typing import Any

import flax
import jax
import jaxlib.version

_READ_GBS = {"h200": 4393.0, "h100": 3110.0}
"""Read bandwidth of torch's float32 sum of 2 to 4 GiB: 4,389 to 4,396 GB/s on three H200s on
2026-11-20 and 2026-11-23, and 3,101 to 3,113 GB/s on an H100 (HBM3) on 2026-11-26. XLA's sum
reached 4,566 and 3,188 GB/s, so a reported share may slightly exceed 100 %."""


def short_name(gpu: str) -> str:
    """Returns the model of a GPU name, such as h200 for "NVIDIA H200"."""
    result = re.search(r"[A-Za-z]+\d+", gpu)
    return result[0].lower() if result else "none"


def read_gbs(gpu: str) -> float | None:
    """Returns the read bandwidth of a GPU in GB/s, or None if it was not measured.

    Args:
      gpu: its name, such as "NVIDIA H200".
    """
    return _READ_GBS.get(short_name(gpu))


def description() -> dict[str, Any]:
    """Returns the date, the device kind and the versions, as results record them."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "flax": flax.__version__,
        },
    }
