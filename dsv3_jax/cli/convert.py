"""``dsv3 convert``: converts a published checkpoint to a store."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.checkpoint import journal, manifest
from dsv3_jax.checkpoint.conversion_plan import ConversionPlan, plan_conversion
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.manifest import Manifest
from dsv3_jax.cli.output import log, print_json
from dsv3_jax.cli.progress import ByteProgress
from dsv3_jax.files import free_bytes
from dsv3_jax.interrupts import report_interrupt
from dsv3_jax.words import counted


def run(arguments: argparse.Namespace) -> None:
    # Imported here because it imports orbax, which takes seconds.
    from dsv3_jax.checkpoint.convert import RESUME_HINT, check_destination, convert

    source, store = find(arguments.source), arguments.destination
    plan = plan_conversion(source, arguments.to)
    summary = _summary(plan, store, arguments.workers)
    for line in _summary_lines(summary):
        log(line)
    if arguments.dry_run:
        check_destination(plan, store, arguments.resume)
    elif arguments.resume and (store / manifest.NAME).is_file():
        convert(source, store, arguments.to, resume=True)
        log(f"{store} is complete; dsv3 verify compares it with SRC")
    else:

        def describe_rest() -> str:
            has_begun = (store / journal.NAME).is_file()
            return f"{store}: {RESUME_HINT}" if has_begun else "nothing was written"

        label = f"convert to {arguments.to}"
        with (
            report_interrupt("convert", describe_rest),
            ByteProgress(plan.source_bytes, label) as progress,
        ):
            result = convert(
                source,
                store,
                arguments.to,
                resume=arguments.resume,
                workers=arguments.workers,
                progress=progress.add,
            )
        summary["errors"] = {kind: error._asdict() for kind, error in result.errors.items()}
        for line in _error_table(result):
            log(line)
    if arguments.json:
        print_json(summary)


def _summary(plan: ConversionPlan, store: Path, workers: int) -> dict[str, object]:
    return {
        "source": str(plan.directory),
        "store": str(store),
        "to": plan.to,
        "keeps_bytes": plan.keeps_bytes,
        "tensors": len(plan.source),
        "source_bytes": plan.source_bytes,
        "store_bytes": plan.store_bytes,
        "arrays": len(plan.arrays),
        "files": plan.files,
        "mtp_layers": plan.config.num_nextn_predict_layers,
        "peak_bytes": plan.peak_bytes(workers),
        "free_bytes": free_bytes(store),
    }


def _summary_lines(summary: Mapping[str, Any]) -> list[str]:
    change = "every byte kept" if summary["keeps_bytes"] else "converted"
    return [
        "{source}: {tensors:,} tensors, {source_bytes:,} bytes, {mtp}".format(
            mtp=counted(summary["mtp_layers"], "MTP layer"), **summary
        ),
        "to {to}, {change}: {arrays:,} arrays in {files:,} files, {store_bytes:,} bytes "
        "({free_bytes:,} free); memory below {peak_bytes:,} bytes".format(change=change, **summary),
    ]


def _error_table(result: Manifest) -> list[str]:
    """Returns the lines of a table of quantization errors, by kind of tensor."""
    if not result.errors:
        return []
    width = max(map(len, result.errors))
    head = f"{'kind':{width}}  tensors  relative rms   largest  largest weight"
    return [head] + [
        f"{kind:{width}}  {error.tensors:7}  {error.relative_rms:12.2e}  {error.largest:8.2e}  "
        f"{error.largest_weight:.2e}"
        for kind, error in result.errors.items()
    ]
