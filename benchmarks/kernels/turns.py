"""The turns in which our kernels and their peers are timed, and their windows."""

from __future__ import annotations

import math
import statistics
from typing import Any

CLOSE = 1.3
"""A peer or variant that is slower than the best by more than this factor gets one turn."""


def names_to_time(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the names to time: ours, those not timed yet, and those close to the fastest."""
    medians = {
        name: statistics.median(entry["windows"]["us"]) if "windows" in entry else 0.0
        for name, entry in parts.items()
    }
    fastest = min(medians.values(), default=0.0)
    return [name for name, us in medians.items() if name == "ours" or us <= CLOSE * fastest]


def append_windows(entry: dict[str, Any], reply: dict[str, Any]) -> None:
    """Appends the windows of a turn to those of earlier turns."""
    if "error" in reply:
        entry["error"] = reply["error"]
        entry.pop("windows", None)
        return
    windows = entry.setdefault("windows", {})
    for name, values in reply.items():
        windows[name] = windows.get(name, []) + (values if isinstance(values, list) else [values])


def summary(windows: dict[str, list[float]]) -> dict[str, float]:
    if not windows:
        return {}
    medians = {n: statistics.median(v) for n, v in windows.items() if n.endswith("us")}
    us = windows["us"]
    result = medians | {"spread": round((max(us) - min(us)) / medians["us"], 4)}
    if "busy" in windows:
        result["busy"] = round(min(windows["busy"]), 3)
    if "resolution_ns" in windows:
        result["resolution_ns"] = math.gcd(*map(int, windows["resolution_ns"]))
    return result
