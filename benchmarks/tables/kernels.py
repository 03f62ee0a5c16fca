"""Tables of single kernels."""

from __future__ import annotations

import re
import statistics
from typing import Any

from benchmarks.tables import results


def _kernel(row: dict[str, Any]) -> list[object]:
    peer, us = row.get("peer") or "none", row["us"]
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else row.get("no_ratio", "")
    peer_cells = ["", ""] if peer == "none" else [f"{row['peer_us']:,.4g}", ratio]
    name = [f"`{row['op']}`", row["dtype"], row["shape"]]
    timed = ["", ""] if us is None else [f"{us:,.4g}", results.share(row["roof_fraction"])]
    return [*name, *timed, peer, *peer_cells]


_KERNEL = (
    "operation",
    "dtype",
    "shape",
    ">us",
    ">% of roofline",
    "best peer",
    ">peer us",
    ">ratio",
)


def kernel_rows() -> list[dict[str, Any]]:
    """Returns the rows of the kernel benchmark, grouped by operation and dtype."""
    rows = results.read("kernels_h200")["rows"]
    kinds = list(dict.fromkeys(map(kind, sorted(rows, key=lambda row: row["op"]))))
    return sorted(rows, key=lambda row: kinds.index(kind(row)))


def kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["op"], row["dtype"]


def kernels() -> str:
    return results.markdown(_KERNEL, map(_kernel, kernel_rows()))


def kernels_by_kind() -> str:
    """Summarises the ratios of all shapes of :func:`kernels`, by operation and dtype."""
    rows = kernel_rows()
    header = ("operation", "dtype", ">shapes", ">with a ratio", "best peers")
    lines: list[list[object]] = []
    for op, dtype in dict.fromkeys(map(kind, rows)):
        of_kind = [row for row in rows if kind(row) == (op, dtype)]
        ratios = sorted(row["ratio"] for row in of_kind if row["ratio"])
        peers = sorted({re.split("[ ,]", row["peer"])[0] for row in of_kind if row.get("peer")})
        spread = [ratios[0], statistics.median(ratios), ratios[-1]] if ratios else []
        cells = [f"{ratio:.2f}" for ratio in spread] or ["", "", ""]
        names = ", ".join(peers) or "none"
        lines.append([f"`{op}`", dtype, len(of_kind), len(ratios), names, *cells])
    return results.markdown([*header, ">lowest ratio", ">median", ">highest"], lines)
