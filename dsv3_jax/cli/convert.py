"""Convert a published checkpoint to a store: streamed, resumable, verified."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dsv3_jax.checkpoint import manifest
from dsv3_jax.checkpoint.load import find
from dsv3_jax.checkpoint.manifest import Manifest
from dsv3_jax.checkpoint.plan import TARGETS, Plan, free_bytes, plan
from dsv3_jax.cli import flags
from dsv3_jax.cli.byte_progress import ByteProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="demo, a directory as published, or a Hub name")
    add("destination", type=Path, metavar="DST", help="a new directory")
    add("--to", choices=TARGETS, default="fp8", help="form of the weights (default: fp8)")
    add("--resume", action="store_true", help="go on with what an earlier run left unfinished")
    add("--dry-run", action="store_true", help="check the headers, say what would be done")
    flags.add_workers(parser, "tensors")
    add("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> None:
    # orbax, on which it stands, is not for every command to wait for.
    from dsv3_jax.checkpoint.convert import check_destination, convert

    source, store = find(arguments.source), arguments.destination
    planned = plan(source, arguments.to)
    summary = _summary(planned, store, arguments.workers)
    for line in _lines(summary):
        print(f"dsv3: {line}", file=sys.stderr)
    if arguments.dry_run:
        check_destination(planned, store, arguments.resume)
    elif arguments.resume and (store / manifest.NAME).is_file():
        convert(source, store, arguments.to, resume=True)
        print(f"dsv3: {store} is complete; dsv3 verify compares it with SRC", file=sys.stderr)
    else:
        with ByteProgress(planned.source_bytes, f"convert to {arguments.to}") as progress:
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
        print(json.dumps(summary))


def _summary(planned: Plan, store: Path, workers: int) -> dict[str, object]:
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


def _lines(summary: dict[str, object]) -> list[str]:
    how = "every byte kept" if summary["keeps_bytes"] else "converted"
    return [
        "{source}: {tensors:,} tensors, {source_bytes:,} bytes, {mtp_layers} MTP layers".format(
            **summary
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
