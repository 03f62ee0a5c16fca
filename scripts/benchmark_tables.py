"""Writes the benchmark tables of docs/ from benchmarks/results/*.json.

    python -m scripts.benchmark_tables

writes each table between its marks, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``. A test
fails if a page does not match the results.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import tables
from dsv3_jax.files import atomic_write

ROOT = Path(__file__).parents[1]
PAGES = tuple(ROOT / name for name in ("docs/benchmarks.md", "docs/speculation.md"))

TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        tables.kernels, tables.kernels_by_kind, tables.decode, tables.sparse_slice, tables.prefill,
        tables.two_gpus, tables.speculation, tables.speculation_one, tables.quantization,
        tables.activations, tables.cpu, tables.vllm,
    )
}  # fmt: skip


def with_tables(text: str) -> str:
    """Returns a page with its tables replaced by those of the results."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            _, has_end, after = rest.partition(end)
            if not has_end:
                raise ValueError(f"expected {end} after {begin}, got none")
            text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def main() -> None:
    for page in PAGES:
        atomic_write(page, with_tables(page.read_text("utf-8")))


if __name__ == "__main__":
    main()
