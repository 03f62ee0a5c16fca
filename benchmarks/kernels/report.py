"""Makes the rows of the report from the windows that the child processes measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.kernels.shapes import Case, PrefillGradient, float8_arithmetic
from benchmarks.machine import read_gbs

Row = dict[str, Any]
MAX_SPREAD = 0.1  # a ratio needs times with at most this spread
BEYOND = 1.05  # a time that exceeds the ceilings by this factor must be wrong
CLOSE = 1.3  # a peer that is slower than the best by more than this factor gets one turn


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
    return result


def ceilings(measured: Mapping[str, Any], gpu: str) -> dict[str, float]:
    """Returns the best matmul throughput of bf16 and fp8 in TFLOP/s, as far as it was measured in
    this run, and the read bandwidth of this GPU in GB/s, if it is known."""
    bandwidth = read_gbs(gpu)
    best = {} if bandwidth is None else {"read_gbs": bandwidth}
    for name, value in measured.items():
        kind = name.partition("_")[2]
        if kind in ("bf16_tflops", "fp8_tflops") and isinstance(value, float):
            best[kind] = max(best.get(kind, 0.0), value)
    return best


def roof_us(case: Case, best: Mapping[str, float]) -> float | None:
    """Returns the roofline time: arithmetic at the measured peak, or traffic at the bandwidth.

    The arithmetic of integer weights and float8 caches is bfloat16.
    """
    peak = best.get("fp8_tflops" if float8_arithmetic(case) else "bf16_tflops")
    if not peak or "read_gbs" not in best:
        return None
    return max(case.flops / peak / 1e6, case.bytes / best["read_gbs"] / 1e3)


def steady(ours: Mapping[str, Any], alternatives: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether the times of ours and of the best other, if any, have a small spread."""
    timed = [each for each in alternatives.values() if each.get("us") and "error" not in each]
    best = min(timed, key=lambda each: each["us"], default={})
    return all(each.get("spread", 0.0) <= MAX_SPREAD for each in (ours, best))


def row(case: Case, ours: Mapping[str, Any], peers: Mapping[str, Any], best) -> Row:
    """Returns one row of the report.

    Args:
      case: the shape.
      ours: {"us": ..., "spread": ..., ...} or {"error": reason, ...}, with XLA's own under "xla".
      peers: name -> {"us": ..., "spread": ...} or {"error": reason}.
      best: result of :func:`ceilings`.
    """
    alternatives = dict(peers)
    if "xla" in ours:
        alternatives["cuDNN" if isinstance(case, PrefillGradient) else "XLA"] = ours["xla"]
    timed = {
        name: each["us"]
        for name, each in alternatives.items()
        if each.get("us") and "error" not in each
    }
    peer = min(timed, key=timed.__getitem__) if timed else None
    us = None if "error" in ours else ours.get("us")
    roof = roof_us(case, best)
    fault = ours.get("error")
    if us and roof and roof / us > BEYOND:
        fault = f"wrong: {us:.4g} us is {roof / us:.3g} times what the ceilings allow"
        us = None
    unsteady = [
        f"spread of {name} {each['spread']:.0%}"
        for name, each in (("ours", ours), (peer, alternatives[peer] if peer else {}))
        if each.get("spread", 0.0) > MAX_SPREAD
    ]
    result: Row = {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "us": _round(us),
        "tflops": _round(case.flops / us / 1e6 if us else None),
        "gbs": _round(case.bytes / us / 1e3 if us else None),
        "roof_fraction": _round(roof / us if us and roof else None),
        "peer": peer,
        "peer_us": _round(timed[peer] if peer else None),
        "ratio": _round(timed[peer] / us) if peer and us and not unsteady else None,
        "peers": {name: _peer(each) for name, each in alternatives.items()},
    }
    if peer and us and unsteady:
        result["no_ratio"] = ", ".join(unsteady)
    if peer is None:
        reasons = [f"{name}: {each.get('error')}" for name, each in alternatives.items()]
        result["no_peer"] = "; ".join(reasons) or "none was requested"
    if fault:
        result["error"] = fault
    for name in ("spread", "busy", "compile_s"):
        if ours.get(name) is not None:
            result[name] = _round(ours[name])
    return result | {
        name: ours[name] for name in ("sets", "kernels_a_call", "tries", "seconds") if name in ours
    }


def _peer(each: Mapping[str, Any]) -> dict[str, Any]:
    if not each.get("us") or "error" in each:
        return {"error": each.get("error")}
    names = ("us", "spread", "busy")
    return {name: _round(each[name]) for name in names if name in each}


def key_of(row: Row) -> str:
    """Returns :func:`benchmarks.kernels.shapes.key` of the row's case."""
    return f"{row['op']} {row['dtype']} {row['shape']}"


def complete(row: Row) -> bool:
    """Returns whether a row need not be measured again."""
    return bool(row.get("us")) and "no_ratio" not in row


def header(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a run, without its rows."""
    return {name: result[name] for name in result if name not in ("rows", "not_run")}


def _round(value: float | None, digits: int = 4) -> float | None:
    """Rounds to ``digits`` significant digits. None and 0 become None."""
    if not value:
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def line(row: Row) -> str:
    """Formats a row. One without a time ends with the reason."""
    numbers = {
        "us": row["us"], "of the roofline": row["roof_fraction"], row["peer"]: row["peer_us"],
        "ratio": row["ratio"],
    }  # fmt: skip
    shown = ", ".join(f"{value} {name}" for name, value in numbers.items() if value is not None)
    note = row.get("error") or row.get("no_ratio")
    return f"{key_of(row)}: {shown}{f' [{note[:90]}]' if note else ''}"
