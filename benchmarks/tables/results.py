"""Reads the result files, and formats tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import read_gbs

RESULTS = Path(__file__).parents[1] / "results"


def read(name: str) -> dict[str, Any]:
    """Reads a result file: ``date``, ``machine``, ``versions``, ``rows``."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table. A heading that begins with ``>`` is right-aligned."""
    rule = ["---:" if name.startswith(">") else "---" for name in header]
    lines = [[name.removeprefix(">") for name in header], rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def timed(names: Iterable[str], phase: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (result name, row) of a phase, without rows of errors or synthetic drafts."""
    for name in names:
        for row in read(name)["rows"]:
            if row.get("phase") == phase and row.get("acceptance") is None:
                yield name, row


def share(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def share_of_peak(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Returns the share of the peak bandwidth, which is the same number for all results of one kind
    of GPU. It is empty if there is none."""
    peak = read_gbs(result["machine"])
    if peak is None or "floor_fraction" not in row:
        return ""
    return share(row["floor_fraction"] * result["read_gbs"] / peak)


def dated_link(name: str) -> str:
    return f"[{read(name)['date']}](../benchmarks/results/{name}.json)"
