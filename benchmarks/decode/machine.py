"""Describes the machine, the software versions and the date of a measurement."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import flax
import jax
import jaxlib.version


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
