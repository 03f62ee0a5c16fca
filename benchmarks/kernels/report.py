"""Rows of the report, from what the child processes measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ceiling import READ_GBS
from benchmarks.kernels.shapes import Case, Grouped, float8_arithmetic

Row = dict[str, Any]
EVERY_GROUP = "XLA multiplies every row by every group's matrix"
MOST_SPREAD = 0.1  # of a time that a ratio may be made of
BEYOND = 1.05  # of the ceilings: no kernel is that fast, so the time is wrong
COLUMNS = (
    "op", "shape", "dtype", "us", "tflops", "gbs", "roof_fraction", "peer", "peer_us", "ratio",
)  # fmt: skip


def ceilings(measured: Mapping[str, Any]) -> dict[str, float]:
    """The best product of bf16 and fp8, in TFLOP/s; absent if none was had."""
    best: dict[str, float] = {}
    for name, value in measured.items():
        kind = name.partition("_")[2]
        if kind in ("bf16_tflops", "fp8_tflops") and isinstance(value, float):
            best[kind] = max(best.get(kind, 0.0), value)
    return best


def roof_us(case: Case, best: Mapping[str, float]) -> float | None:
    """The least time: arithmetic at the measured peak, or traffic at ``READ_GBS``.

    Integer weights and float8 caches are multiplied as bfloat16.
    """
    peak = best.get("fp8_tflops" if float8_arithmetic(case) else "bf16_tflops")
    if not peak:
        return None
    return max(case.flops / peak / 1e6, case.bytes / READ_GBS / 1e3)


def steady(ours: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a ratio may be made of ours and the best other, if there are times of both."""
    timed = [each for each in others.values() if each.get("us") and "error" not in each]
    best = min(timed, key=lambda each: each["us"], default={})
    return all(each.get("spread", 0.0) <= MOST_SPREAD for each in (ours, best))


def row(case: Case, ours: Mapping[str, Any], peers: Mapping[str, Any], best) -> Row:
    """One line of the report.

    Args:
      ours: {"us": ..., "spread": ..., ...} or {"error": reason, ...}, and XLA's own under "xla".
      peers: name -> {"us": ..., "spread": ...} or {"error": reason}.
      best: as :func:`ceilings`.
    """
    others = dict(peers)
    if "xla" in ours:
        others["XLA"] = ours["xla"]
    timed = {
        name: each["us"]
        for name, each in others.items()
        if each.get("us") and "error" not in each and not (name == "XLA" and _every_group(case))
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
        for name, each in (("ours", ours), (peer, others[peer] if peer else {}))
        if each.get("spread", 0.0) > MOST_SPREAD
    ]
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
        "ratio": _short(timed[peer] / us) if peer and us and not unsteady else None,
        "peers": {name: _peer(each) for name, each in others.items()},
    }
    if peer and us and unsteady:
        found["no_ratio"] = ", ".join(unsteady)
    if peer is None:
        reasons = [f"{name}: {each.get('error') or EVERY_GROUP}" for name, each in others.items()]
        found["no_peer"] = "; ".join(reasons) or "none was asked for"
    if fault:
        found["error"] = fault
    for name in ("spread", "busy", "resolution_ns", "compile_s"):
        if ours.get(name) is not None:
            found[name] = _short(ours[name])
    return found | {
        name: ours[name] for name in ("sets", "kernels_a_call", "tries", "seconds") if name in ours
    }


def _every_group(case: Case) -> bool:
    """Whether XLA's own lowering does more than was asked for: no peer."""
    return isinstance(case, Grouped) and len(case.sizes) > 1


def _peer(each: Mapping[str, Any]) -> dict[str, Any]:
    if not each.get("us") or "error" in each:
        return {"error": each.get("error")}
    names = ("us", "spread", "event_us", "busy")
    return {name: _short(each[name]) for name in names if name in each}


def key_of(row: Row) -> str:
    """As :func:`benchmarks.kernels.shapes.key` of its case."""
    return f"{row['op']} {row['dtype']} {row['shape']}"


def complete(row: Row) -> bool:
    """Whether a row need not be measured again."""
    return bool(row.get("us")) and "no_ratio" not in row


def header(result: Mapping[str, Any]) -> dict[str, Any]:
    """What tells of a run, without its rows."""
    return {name: result[name] for name in result if name not in ("rows", "not_run")}


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
        note = each.get("error") or each.get("no_ratio")
        notes = f"  [{note[:90]}]" if note else ""
        lines.append(
            f"{each['op']:15}{each['dtype']:6}{each['shape']:26}{_cell(each['us'], 9, 1)}"
            f"{_cell(each['tflops'], 9)}{_cell(each['gbs'], 7)}{_cell(each['roof_fraction'], 6, 2)}"
            f"{_cell(each['peer_us'], 9, 1)}{_cell(each['ratio'], 7, 2)}  {peer}{notes}"
        )
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int = 0) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"
