"""How far two checkpoints of one model are apart, whatever forms they are in."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table
from dsv3_jax.checkpoint.threads import Progress, in_threads
from dsv3_jax.checkpoint.verify import Scans, sum_of_squares

_FREE = ("dtype", "quantization")  # what a conversion may change in a config


@dataclasses.dataclass
class Difference:
    """Between tensors a and b, or between many."""

    tensors: int = 0
    equal_bytes: int = 0
    """Tensors that are equal byte for byte, and stored in one dtype; a weight with its scale."""
    largest: float = 0.0
    """max |a - b|"""
    squares: float = 0.0
    """sum (a - b)^2"""
    of_a: float = 0.0
    """sum a^2"""

    @property
    def relative_rms(self) -> float | None:
        """sqrt(sum (a - b)^2 / sum a^2); None where b differs from zeros."""
        if not self.of_a:
            return None if self.squares else 0.0
        return math.sqrt(self.squares / self.of_a)

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        apart = a - b
        self.largest = max(self.largest, float(apart.max()), -float(apart.min()))
        self.squares += sum_of_squares(apart)
        self.of_a += sum_of_squares(a)

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.tensors + other.tensors,
            self.equal_bytes + other.equal_bytes,
            max(self.largest, other.largest),
            self.squares + other.squares,
            self.of_a + other.of_a,
        )


class Comparison(NamedTuple):
    """What a pass over two checkpoints found."""

    differences: dict[str, Difference]
    """Of each tensor that both have, by its published name."""
    first: str | None
    """A line with the first difference of tensors or configs, None without any."""
    source_hashes: int | None
    """Tensors of A that hash to what B, a store, was made from; None unless A is its source."""
    findings: list[str]
    """Why they are no whole checkpoints of one model, a line each."""


def compare(
    a: OpenCheckpoint, b: OpenCheckpoint, *, workers: int = 1, count: Progress = lambda n: None
) -> Comparison:
    """Reads both once, and checks as :func:`verify` does what both have.

    Values are compared in float32, quantised ones dequantised. A is taken for the source of a store
    B if most of its tensors hash to what B's manifest says; those that do not are findings.
    """
    of_a, of_b = Scans(a, count), Scans(b, count)
    findings, names = _alike(a, b)

    differences = {name: Difference(tensors=1) for name in names}
    lines: dict[str, str] = {}

    def one(name: str) -> None:
        scan_a, scan_b, found = of_a.of(name), of_b.of(name), differences[name]
        rows = math.lcm(scan_a.multiple, scan_b.multiple)
        # Where one of them cannot be read to its end, the other need not be.
        for part_a, part_b in zip(scan_a.parts(rows), scan_b.parts(rows), strict=False):
            found.add(part_a, part_b)
        of_a.done(scan_a)
        of_b.done(scan_b)
        same_form = scan_a.dtypes == scan_b.dtypes
        if same_form and scan_a.digests() == scan_b.digests():
            found.equal_bytes = 1
        elif found.largest:
            lines[name] = f"{name}: differs by up to {found.largest:.3g}"
        elif same_form:
            lines[name] = f"{name}: other bytes, though of the same values"

    in_threads(workers, one, names)
    for scans, side in ((of_a, a), (of_b, b)):
        scans.hash_others()
        findings += [f"{line} (in {side.directory})" for line in scans.findings()]
    source_hashes, changed = _source(b, of_a.digests)
    first = next((lines[name] for name in names if name in lines), None)
    return Comparison(
        differences, first or _configs_differ(a, b), source_hashes, findings + changed
    )


def _alike(a: OpenCheckpoint, b: OpenCheckpoint) -> tuple[list[str], list[str]]:
    """Names and shapes that one has and the other has not, a line each; tensors to compare."""
    of_a, of_b = _shapes(a), _shapes(b)
    may_be_absent = {*copies(a.config), *copies(b.config)}
    findings = []
    for name in of_a | of_b:
        if name in may_be_absent and not (name in of_a and name in of_b):
            continue
        if name not in of_b:
            findings.append(f"{name}: expected as in {a.directory}, not in {b.directory}")
        elif name not in of_a:
            findings.append(f"{name}: in {b.directory}, and not in {a.directory}")
        elif of_a[name] != of_b[name]:
            findings.append(f"{name}: expected shape {of_a[name]}, got {of_b[name]}")
    with_values = set(b.with_values())
    names = [n for n in a.with_values() if n in with_values and of_a[n] == of_b[n]]
    return findings, names


def _shapes(checkpoint: OpenCheckpoint) -> dict[str, tuple[int, ...]]:
    """Of the tensors that are there, scales left out, as if none were packed."""
    plain = dataclasses.replace(checkpoint.config, quantization=None)
    table = tensor_table(plain)
    return {name: spec.shape for name, spec in table.items() if name in checkpoint.arrays}


def _configs_differ(a: OpenCheckpoint, b: OpenCheckpoint) -> str | None:
    for field in dataclasses.fields(a.config):
        of_a, of_b = (getattr(side.config, field.name) for side in (a, b))
        if of_a != of_b and field.name not in _FREE:
            return f"config: {field.name}: expected {of_a}, got {of_b}"
    return None


def _source(b: OpenCheckpoint, digests: dict[str, str]) -> tuple[int | None, list[str]]:
    """How many of these B was made from, and those that it was not, if most are."""
    if b.manifest is None:
        return None, []
    recorded = {n: e.hash for n, e in b.manifest.source.items() if n in digests}
    changed = [name for name, hash in recorded.items() if digests[name] != hash]
    if 2 * len(changed) >= len(recorded):
        return None, []
    lines = [f"{n}: no longer has the bytes that {b.directory} was made from" for n in changed]
    return len(recorded) - len(changed), lines
