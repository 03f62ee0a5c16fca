"""Rows of the report, from what the child processes measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kernels.shapes import Case, float8_arithmetic

Row = dict[str, Any]
BEYOND = 1.05  # of the ceilings: no kernel is that fast, so the time is wrong
COLUMNS = (
    "op", "shape", "dtype", "us", "tflops", "gbs", "roof_fraction", "peer", "peer_us", "ratio",
)  # fmt: skip


def ceilings(measured: Mapping[str, Any]) -> dict[str, float]:
    """The best of each: bf16 and fp8 in TFLOP/s, and bandwidth in GB/s; absent if none was had."""
    best: dict[str, float] = {}
    for name, value in measured.items():
        kind = {
            "bf16_tflops": "bf16_tflops",
            "fp8_tflops": "fp8_tflops",
            "copy_gbs": "gbs",
            "read_sum_gbs": "gbs",
        }.get(name.partition("_")[2])
        if kind and isinstance(value, float):
            best[kind] = max(best.get(kind, 0.0), value)
    return best


def roof_us(case: Case, best: Mapping[str, float]) -> float | None:
    """The least time: arithmetic at the measured peak, or traffic at the measured bandwidth.

    Integer weights and float8 caches are multiplied as bfloat16.
    """
    peak = best.get("fp8_tflops" if float8_arithmetic(case) else "bf16_tflops")
    if not peak or "gbs" not in best:
        return None
    return max(case.flops / peak / 1e6, case.bytes / best["gbs"] / 1e3)


def row(case: Case, ours: Mapping[str, Any], peers: Mapping[str, Any], best) -> Row:
    """One line of the report.

    Args:
      ours: {"us": ..., ...} or {"error": reason, ...}, and XLA's own under "xla".
      peers: name -> {"us": ...} or {"error": reason}.
      best: as :func:`ceilings`.
    """
    others = dict(peers)
    if "xla" in ours:
        others["XLA"] = ours["xla"]
    timed = {name: each["us"] for name, each in others.items() if each.get("us")}
    peer = min(timed, key=timed.__getitem__) if timed else None
    us = ours.get("us")
    roof = roof_us(case, best)
    fault = ours.get("error")
    if us and roof and roof / us > BEYOND:
        fault = f"wrong: {us:.4g} us is {roof / us:.3g} times what the ceilings allow"
        us = None
    found: Row = {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "us": _short(us),
        "tflops": _short(case.flops / us / 1e6 if us else None),
        "gbs": _short(case.bytes / us / 1e3 if us else None),
        "roof_fraction": _short(roof / us if us and roof else None),
        "peer": peer,
        "peer_us": _short(timed[peer] if peer else None),
        "ratio": _short(timed[peer] / us if peer and us else None),
        "peers": {
            name: {"us": _short(each["us"])} if each.get("us") else {"error": each.get("error")}
            for name, each in others.items()
        },
    }
    if peer is None:
        reasons = [f"{name}: {each.get('error')}" for name, each in others.items()]
        found["no_peer"] = "; ".join(reasons) or "none was asked for"
    if fault:
        found["error"] = fault
    for name in ("sets", "compile_s", "kernels_a_call", "spread", "seconds"):
        if name in ours:
            found[name] = _short(ours[name]) if name == "compile_s" else ours[name]
    return found


def _short(value: float | None, digits: int = 4) -> float | None:
    """Four significant digits; None stays."""
    if not value:
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def table(rows: Sequence[Row]) -> str:
    """One line a row, reasons at the end of those that have no time."""
    lines = [f"{'op':15}{'dtype':6}{'shape':26}{'us':>9}{'TFLOP/s':>9}{'GB/s':>7}{'roof':>6}"
             f"{'peer us':>9}{'ratio':>7}  peer"]  # fmt: skip
    for each in rows:
        peer = each["peer"] or "none"
        notes = f"  [{each['error'][:90]}]" if "error" in each else ""
        lines.append(
            f"{each['op']:15}{each['dtype']:6}{each['shape']:26}{_cell(each['us'], 9, 1)}"
            f"{_cell(each['tflops'], 9)}{_cell(each['gbs'], 7)}{_cell(each['roof_fraction'], 6, 2)}"
            f"{_cell(each['peer_us'], 9, 1)}{_cell(each['ratio'], 7, 2)}  {peer}{notes}"
        )
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int = 0) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"
