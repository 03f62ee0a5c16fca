"""What ``dsv3 verify`` says: as JSON, and the same as text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeVar

from dsv3_jax.checkpoint.compare import Comparison, Difference
from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint, group_by_kind
from dsv3_jax.checkpoint.verify import ValueStats, Verification

T = TypeVar("T", ValueStats, Difference)


def of_one(checkpoint: OpenCheckpoint, found: Verification) -> dict[str, Any]:
    """Tensor kinds with their figures."""
    sums = _sums(checkpoint, found.stats, ValueStats())
    kinds = {
        kind: {
            "tensors": figures.tensors,
            "values": figures.values,
            "largest": figures.largest,
            "rms": figures.rms,
            "scales": figures.scales,
        }
        for kind, figures in sums.items()
    }
    return {"tensors": found.tensors, "kinds": kinds}


def of_two(a: OpenCheckpoint, found: Comparison) -> dict[str, Any]:
    """Tensor kinds with their differences."""
    sums = _sums(a, found.differences, Difference())
    return {
        "tensors": len(found.differences),
        "equal": found.first is None and not found.findings,
        "first_difference": found.first,
        "source_hashes": found.source_hashes,
        "total": _difference(sum(sums.values(), Difference())),
        "kinds": {kind: _difference(difference) for kind, difference in sums.items()},
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """A table with a line for each tensor kind."""
    return _lines_of_one(report) if report["b"] is None else _lines_of_two(report)


def _lines_of_one(report: Mapping[str, Any]) -> list[str]:
    width = max(map(len, report["kinds"]))
    out = [f"{report['a']}: {report['tensors']:,} tensors, {report['bytes']:,} bytes, all good"]
    out.append(f"{'kind':{width}}  tensors  largest      rms  scales")
    for kind, row in report["kinds"].items():
        scales = "{:.3g} to {:.3g}".format(*row["scales"]) if row["scales"] else ""
        counted = f"{kind:{width}} {row['tensors']:8,}"
        out.append(f"{counted} {row['largest']:8.3g} {row['rms']:8.3g}  {scales}".rstrip())
    return out


def _lines_of_two(report: Mapping[str, Any]) -> list[str]:
    a, b = report["a"], report["b"]
    width = max(map(len, report["kinds"]))
    out = [f"{a} and {b}: {report['tensors']:,} tensors compared, a weight with its scale as one"]
    out.append(f"{'kind':{width}}  tensors  same bytes  largest difference  relative rms")
    for kind, row in [*report["kinds"].items(), ("all", report["total"])]:
        relative = "" if row["relative_rms"] is None else f"{row['relative_rms']:.3g}"
        counted = f"{kind:{width}} {row['tensors']:8,} {row['equal_bytes']:11,}"
        out.append(f"{counted} {row['largest']:19.3g} {relative:>13}".rstrip())
    if report["source_hashes"] is not None:
        out.append(f"{report['source_hashes']:,} tensors hash to what the store was made from")
    out.append(f"first difference: {report['first_difference'] or 'none'}")
    return out


def _sums(checkpoint: OpenCheckpoint, of_each: Mapping[str, T], none: T) -> dict[str, T]:
    """By tensor kind, in the order data flows."""
    kinds = group_by_kind(checkpoint.config, of_each)
    return {k: sum(itertools.chain(*layers.values()), none) for k, layers in kinds.items()}


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "tensors": difference.tensors,
        "equal_bytes": difference.equal_bytes,
        "largest": difference.largest,
        "relative_rms": difference.relative_rms,
    }
