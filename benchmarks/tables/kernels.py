"""Tables of single kernels."""

from __future__ import annotations

import re
import statistics
from typing import Any

from benchmarks.tables import results

_NEWER_KERNELS = "kernels_first_run_h200", "kernels_second_run_h200", "kernels_third_run_h200"
"""Later results replace earlier ones of the same shape."""
_SPARSE_KERNELS = "kernels_sparse_h100", "kernels_index_weights_h100"
_NOW_DEFAULT = (
    ("", "", "unrolled"),
    ("top_k", "b1 ", "8 programs"),
    ("top_k", "b64 ", "2 programs"),
    ("top_k", "b1024 ", "1 program"),
    ("sparse_mla_decode", "h16 ", "without prefetch"),
    ("sparse_mla_prefill", "", "without prefetch"),
    ("sparse_index", "sq1", "persistent, 1 query, 32 pages"),
    ("sparse_index", "b1 ", "persistent, 4 queries, 1 per iteration"),
    ("sparse_index", "sq4096", "kept weights"),
    ("sparse_index", "sq2048", "kept weights"),
    ("mla_decode", "h16 b", "scored"),
)
"""Operation, part of its shape, and the variant that has become the default since."""


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


def newer_kernels() -> str:
    """Returns the newer kernels with the settings that are the default now."""
    newest = {
        (*kind(row), row["shape"]): row
        for name in _NEWER_KERNELS
        for row in results.read(name)["rows"]
    }
    rows = [newest[key] for key in sorted(newest)]
    return results.markdown(_KERNEL, (_kernel(_with_new_default(row)) for row in rows))


def sparse_kernels() -> str:
    """Returns the kernels of sparse attention as they are now."""
    newest = {
        (*kind(row), row["shape"]): row
        for name in _SPARSE_KERNELS
        for row in results.read(name)["rows"]
    }
    share = _KERNEL.index(">% of roofline")  # of an H200
    timed = (_with_new_default(newest[key]) for key in sorted(newest))
    rows = [_KERNEL, *map(_kernel, timed)]
    header, *cells = ([*row[:share], *row[share + 1 :]] for row in rows)
    return results.markdown(header, cells)


def _with_new_default(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the time of a variant that has become the default since."""
    for op, shape, name in _NOW_DEFAULT:
        us = row.get("variants", {}).get(name, {}).get("us")
        if us is None or (op and op != row["op"]) or shape not in row["shape"]:
            continue
        share = row["roof_fraction"] and row["roof_fraction"] * row["us"] / us
        return row | {"us": us, "roof_fraction": share, "ratio": row["peer_us"] / us}
    return row


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
