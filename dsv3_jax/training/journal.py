"""The story of a run, one JSON object a line: metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv3_jax.files import atomic_write
from dsv3_jax.training.step import Metrics
from sharding.distributed import barrier

Row = dict[str, Any]


class Journal:
    """Appends rows to a file; what a killed run wrote past ``step`` is taken away first.

    The run goes on from the checkpoint of ``step`` and will write those rows again, the same ones.
    Of several processes the first writes; the others have the rows alone.
    """

    def __init__(self, path: Path, step: int = -1):
        self.rows = [row for row in read_rows(path) if row["step"] <= step]
        barrier("rows read")
        self._file = None
        if jax.process_index():
            return
        text = "".join(map(_line, self.rows))
        atomic_write(path, text)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Appends a row.

        Raises:
          ValueError: a number in it is not finite: the run has diverged.
        """
        if wrong := divergence(row):
            raise ValueError(wrong)
        self.rows.append(row)
        if self._file is not None:
            self._file.write(_line(row))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, without a last line that was cut short; none of no file."""
    return list(_whole_rows(path)) if path.is_file() else []


def _whole_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a step, got {line[:60]!r}"
            ) from None
        yield row


def _line(row: Row) -> str:
    # A float in JSON is the shortest decimal that reads back as the same float.
    return json.dumps(row, allow_nan=False) + "\n"


def metrics_row(step: int, metrics: Metrics) -> Row:
    """Metrics on the host as a row: ``losses`` by name, scalars by name, and for each MoE layer its
    largest expert load over the mean."""
    losses = {name: float(value) for name, value in metrics.losses._asdict().items()}
    row: Row = {"step": step, "losses": losses}
    for name, value in metrics._asdict().items():
        if name == "expert_load":
            load = np.asarray(value)
            means = np.maximum(load.mean(axis=-1), 1e-9)
            row[name] = (load.max(axis=-1) / means).tolist()
        elif name != "losses":
            row[name] = float(value)
    return row


def divergence(row: Row) -> str | None:
    """Returns a line that names the first loss or norm in a row that is not finite, if any."""
    numbers = {"gradient_norm": row.get("gradient_norm", 0.0)}
    for part in ("losses", "held_out"):
        numbers |= {f"{part}.{name}": value for name, value in row.get(part, {}).items()}
    for name, value in numbers.items():
        if not math.isfinite(value):
            return (
                f"step {row['step']}: {name} is {value}; expected a finite number: "
                "the run has diverged"
            )
    return None
