"""Check every value of a checkpoint, or compare two."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from dsv3_jax.cli import flags
from dsv3_jax.cli.byte_progress import ByteProgress
from dsv3_jax.viz.canvas import check_matplotlib, save

_LISTED = 100  # findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="demo, a Hugging Face directory, a store, or a Hub name")
    add("b", metavar="B", nargs="?", help="another checkpoint of the same model, in any form")
    add("--equal", action="store_true", help="with B: any difference is an error")
    add(
        "--plot", type=Path, metavar="PNG", help="draw weights and scales, or differences, by layer"
    )
    flags.add_workers(parser, "tensors")
    add("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    _check(arguments)
    # These bring orbax: seconds that no other command should wait for.
    from dsv3_jax.checkpoint.compare import compare
    from dsv3_jax.checkpoint.opened import open_checkpoint
    from dsv3_jax.checkpoint.verify import total_bytes, verify
    from dsv3_jax.cli import verify_report

    a = open_checkpoint(arguments.a)
    size = total_bytes(a)
    if arguments.b is None:
        with ByteProgress(size, "verify") as progress:
            verified = verify(a, workers=arguments.workers, count=progress.add)
        findings, report = verified.findings, verify_report.of_one(a, verified)
        if arguments.plot is not None:
            from dsv3_jax.viz.weights import weights

            save(weights(a.config, verified.figures, arguments.a), arguments.plot)
    else:
        b = open_checkpoint(arguments.b)
        size += total_bytes(b)
        with ByteProgress(size, "compare") as progress:
            compared = compare(a, b, workers=arguments.workers, count=progress.add)
        findings, report = compared.findings, verify_report.of_two(a, compared)
        if arguments.equal and compared.first is not None:
            findings = [*findings, compared.first]
        if arguments.plot is not None:
            from dsv3_jax.viz.weights import weight_differences

            title = f"{arguments.a} and {arguments.b}"
            save(weight_differences(a.config, compared.differences, title), arguments.plot)
    report = {
        "a": arguments.a,
        "b": arguments.b,
        "bytes": size,
        **report,
        "findings": findings[:_LISTED],
        "findings_total": len(findings),
        "seconds": round(time.perf_counter() - began, 3),
        "plot": arguments.plot and str(arguments.plot),
    }
    if arguments.json:
        print(json.dumps(report))
    elif findings:
        print("\n".join(f"dsv3: {line}" for line in findings[:_LISTED]), file=sys.stderr)
    else:
        print("\n".join(verify_report.lines(report)))
    if findings:
        more = f" and {len(findings) - 1:,} more" if len(findings) > 1 else ""
        raise ValueError(findings[0] + more)


def _check(arguments: argparse.Namespace) -> None:
    """Before anything is read, which may take an hour."""
    if arguments.workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {arguments.workers}")
    if arguments.equal and arguments.b is None:
        raise ValueError("--equal: expected two checkpoints, got one")
    if arguments.plot is None:
        return
    check_matplotlib("--plot")
    if arguments.plot.suffix != ".png" or not arguments.plot.absolute().parent.is_dir():
        raise ValueError(
            f"--plot: expected a .png in a directory that exists, got {arguments.plot}"
        )
