"""What a figure must stand beside: machine, versions, date."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import flax
import jax
import jaxlib.version


def description() -> dict[str, Any]:
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
