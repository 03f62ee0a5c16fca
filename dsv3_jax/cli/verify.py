"""``dsv3 verify``: checks every value of a checkpoint, or compares two checkpoints."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from dsv3_jax.checkpoint.compare import Comparison, Difference
from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint, group_by_kind
from dsv3_jax.checkpoint.verify import ValueStats, Verification
from dsv3_jax.cli.output import print_json
from dsv3_jax.cli.progress import ByteProgress
from dsv3_jax.viz.canvas import check_picture, save

_MAX_FINDINGS = 100  # the number that is printed


def run(arguments: argparse.Namespace) -> None:
    """Runs the command. Findings are printed, and end it with a ValueError."""
    began = time.perf_counter()
    # Before anything is read, because reading may take an hour.
    if arguments.workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {arguments.workers}")
    if arguments.equal and arguments.b is None:
        raise ValueError("--equal: expected two checkpoints, got one")
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
    # Imported here because they import orbax, which takes seconds.
    from dsv3_jax.checkpoint.compare import compare
    from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
    from dsv3_jax.checkpoint.verify import total_bytes, verify

    a = open_checkpoint(arguments.a)
    size = total_bytes(a)
    if arguments.b is None:
        with ByteProgress(size, "verify") as progress:
            verification = verify(a, workers=arguments.workers, progress=progress.add)
        findings = verification.findings
        report = verification_json(a, verification)
        if arguments.plot is not None:
            from dsv3_jax.viz.weights import weights

            save(weights(a.config, verification.stats, arguments.a), arguments.plot)
    else:
        b = open_checkpoint(arguments.b)
        size += total_bytes(b)
        with ByteProgress(size, "compare") as progress:
            comparison = compare(a, b, workers=arguments.workers, progress=progress.add)
        findings = comparison.findings
        report = comparison_json(a, comparison)
        if arguments.equal and comparison.first_difference is not None:
            findings = [*findings, comparison.first_difference]
        if arguments.plot is not None:
            from dsv3_jax.viz.weights import weight_differences

            title = f"{arguments.a} and {arguments.b}"
            save(weight_differences(a.config, comparison.differences, title), arguments.plot)
    report = {
        "a": arguments.a,
        "b": arguments.b,
        "bytes": size,
        **report,
        "findings": findings[:_MAX_FINDINGS],
        "findings_total": len(findings),
        "seconds": round(time.perf_counter() - began, 3),
        "plot": arguments.plot and str(arguments.plot),
    }
    if arguments.json:
        print_json(report)
    elif findings:
        print("\n".join(f"dsv3: {line}" for line in findings[:_MAX_FINDINGS]), file=sys.stderr)
    else:
        print("\n".join(table(report)))
    if findings:
        more = f" and {len(findings) - 1:,} more" if len(findings) > 1 else ""
        raise ValueError(findings[0] + more)


T = TypeVar("T", ValueStats, Difference)


def verification_json(checkpoint: OpenCheckpoint, verification: Verification) -> dict[str, Any]:
    """Returns the JSON object of one checkpoint, with the statistics of each kind of tensor."""
    sums = _sum_by_kind(checkpoint, verification.stats, ValueStats())
    kinds = {
        kind: {
            "tensors": stats.tensors,
            "values": stats.values,
            "largest": stats.largest,
            "rms": stats.rms,
            "scales": stats.scales,
        }
        for kind, stats in sums.items()
    }
    return {"tensors": verification.tensors, "kinds": kinds}


def comparison_json(a: OpenCheckpoint, comparison: Comparison) -> dict[str, Any]:
    """Returns the JSON object of two checkpoints, with the differences of each kind of tensor."""
    sums = _sum_by_kind(a, comparison.differences, Difference())
    return {
        "tensors": len(comparison.differences),
        "equal": comparison.first_difference is None and not comparison.findings,
        "first_difference": comparison.first_difference,
        "source_hashes": comparison.source_hashes,
        "total": _difference_json(sum(sums.values(), Difference())),
        "kinds": {kind: _difference_json(difference) for kind, difference in sums.items()},
    }


def table(report: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a table of a report, with one line for each kind of tensor."""
    return _verification_table(report) if report["b"] is None else _comparison_table(report)


def _verification_table(report: Mapping[str, Any]) -> list[str]:
    width = max(map(len, report["kinds"]))
    out = [f"{report['a']}: {report['tensors']:,} tensors, {report['bytes']:,} bytes, all good"]
    out.append(f"{'kind':{width}}  tensors  largest      rms  scales")
    for kind, row in report["kinds"].items():
        scales = "{:.3g} to {:.3g}".format(*row["scales"]) if row["scales"] else ""
        tensors = f"{kind:{width}} {row['tensors']:8,}"
        out.append(f"{tensors} {row['largest']:8.3g} {row['rms']:8.3g}  {scales}".rstrip())
    return out


def _comparison_table(report: Mapping[str, Any]) -> list[str]:
    a, b = report["a"], report["b"]
    width = max(map(len, report["kinds"]))
    count = f"{report['tensors']:,} tensors compared, counting a weight and its scale as one"
    out = [f"{a} and {b}: {count}"]
    out.append(f"{'kind':{width}}  tensors  same bytes  largest difference  relative rms")
    for kind, row in [*report["kinds"].items(), ("all", report["total"])]:
        relative = "" if row["relative_rms"] is None else f"{row['relative_rms']:.3g}"
        tensors = f"{kind:{width}} {row['tensors']:8,} {row['equal_bytes']:11,}"
        out.append(f"{tensors} {row['largest']:19.3g} {relative:>13}".rstrip())
    if report["source_hashes"] is not None:
        out.append(f"{report['source_hashes']:,} tensors have the hashes that the store recorded")
    out.append(f"first difference: {report['first_difference'] or 'none'}")
    return out


def _sum_by_kind(checkpoint: OpenCheckpoint, by_tensor: Mapping[str, T], zero: T) -> dict[str, T]:
    """Sums values of tensors over each kind of tensor, in the order data flows."""
    kinds = group_by_kind(checkpoint.config, by_tensor)
    return {k: sum(itertools.chain(*layers.values()), zero) for k, layers in kinds.items()}


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "tensors": difference.tensors,
        "equal_bytes": difference.equal_bytes,
        "largest": difference.largest,
        "relative_rms": difference.relative_rms,
    }
