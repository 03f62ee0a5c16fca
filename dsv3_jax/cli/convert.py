"""Convert a published checkpoint to a store: streamed, resumable, verified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.checkpoint import journal, manifest
from dsv3_jax.checkpoint.conversion_plan import ConversionPlan, free_bytes, plan_conversion
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.manifest import Manifest
from dsv3_jax.cli.byte_progress import ByteProgress
from dsv3_jax.cli.interrupt_report import report_interrupt
from dsv3_jax.cli.output import print_json
from dsv3_jax.words import counted


def run(arguments: argparse.Namespace) -> None:
    # orbax, on which it stands, is not for every command to wait for.
    from dsv3_jax.checkpoint.convert import RESUME_HINT, check_destination, convert

    source, store = find(arguments.source), arguments.destination
    planned = plan_conversion(source, arguments.to)
    summary = _summary(planned, store, arguments.workers)
    for line in _lines(summary):
        print(f"dsv3: {line}", file=sys.stderr)
    if arguments.dry_run:
        check_destination(planned, store, arguments.resume)
    elif arguments.resume and (store / manifest.NAME).is_file():
        convert(source, store, arguments.to, resume=True)
        print(f"dsv3: {store} is complete; dsv3 verify compares it with SRC", file=sys.stderr)
    else:

        def kept() -> str:
            began = (store / journal.NAME).is_file()
            return f"{store}: {RESUME_HINT}" if began else "nothing was written"

        label = f"convert to {arguments.to}"
        with (
            report_interrupt("convert", kept),
            ByteProgress(planned.source_bytes, label) as progress,
        ):
            made = convert(
                source,
                store,
                arguments.to,
                resume=arguments.resume,
                workers=arguments.workers,
                progress=progress.add,
            )
        summary["errors"] = {kind: e._asdict() for kind, e in made.errors.items()}
        for line in _errors(made):
            print(f"dsv3: {line}", file=sys.stderr)
    if arguments.json:
        print_json(summary)


def _summary(planned: ConversionPlan, store: Path, workers: int) -> dict[str, object]:
    return {
        "source": str(planned.directory),
        "store": str(store),
        "to": planned.to,
        "keeps_bytes": planned.keeps,
        "tensors": len(planned.source),
        "source_bytes": planned.source_bytes,
        "store_bytes": planned.store_bytes,
        "arrays": len(planned.arrays),
        "files": planned.files,
        "mtp_layers": planned.config.num_nextn_predict_layers,
        "peak_bytes": planned.peak_bytes(workers),
        "free_bytes": free_bytes(store),
    }


def _lines(summary: Mapping[str, Any]) -> list[str]:
    how = "every byte kept" if summary["keeps_bytes"] else "converted"
    return [
        "{source}: {tensors:,} tensors, {source_bytes:,} bytes, {mtp}".format(
            mtp=counted(summary["mtp_layers"], "MTP layer"), **summary
        ),
        "to {to}, {how}: {arrays:,} arrays in {files:,} files, {store_bytes:,} bytes "
        "({free_bytes:,} free); memory below {peak_bytes:,} bytes".format(how=how, **summary),
    ]


def _errors(made: Manifest) -> list[str]:
    """The error report as a table."""
    if not made.errors:
        return []
    width = max(map(len, made.errors))
    head = f"{'kind':{width}}  tensors  relative rms   largest  of"
    return [head] + [
        f"{kind:{width}}  {e.tensors:7}  {e.relative_rms:12.2e}  {e.largest:8.2e}  "
        f"{e.largest_weight:.2e}"
        for kind, e in made.errors.items()
    ]
