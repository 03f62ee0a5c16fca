"""``dsv3 verify``: checks every value of a checkpoint, or compares two checkpoints."""

from __future__ import annotations

import argparse
import sys
import time

from dsv3_jax.cli.byte_progress import ByteProgress
from dsv3_jax.cli.output import print_json
from dsv3_jax.viz.canvas import check_picture, save

_MAX_FINDINGS = 100  # the number that is printed


def run(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
      ValueError: an argument is refused, or there are findings; they have been printed.
    """
    began = time.perf_counter()
    _check(arguments)
    # Imported here because they import orbax, which takes seconds.
    from dsv3_jax.checkpoint.compare import compare
    from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
    from dsv3_jax.checkpoint.verify import total_bytes, verify
    from dsv3_jax.cli import verify_report

    a = open_checkpoint(arguments.a)
    size = total_bytes(a)
    if arguments.b is None:
        with ByteProgress(size, "verify") as progress:
            verification = verify(a, workers=arguments.workers, progress=progress.add)
        findings = verification.findings
        report = verify_report.verification_json(a, verification)
        if arguments.plot is not None:
            from dsv3_jax.viz.weights import weights

            save(weights(a.config, verification.stats, arguments.a), arguments.plot)
    else:
        b = open_checkpoint(arguments.b)
        size += total_bytes(b)
        with ByteProgress(size, "compare") as progress:
            comparison = compare(a, b, workers=arguments.workers, progress=progress.add)
        findings = comparison.findings
        report = verify_report.comparison_json(a, comparison)
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
        print("\n".join(verify_report.table(report)))
    if findings:
        more = f" and {len(findings) - 1:,} more" if len(findings) > 1 else ""
        raise ValueError(findings[0] + more)


def _check(arguments: argparse.Namespace) -> None:
    """Checks the arguments before anything is read, because reading may take an hour."""
    if arguments.workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {arguments.workers}")
    if arguments.equal and arguments.b is None:
        raise ValueError("--equal: expected two checkpoints, got one")
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
