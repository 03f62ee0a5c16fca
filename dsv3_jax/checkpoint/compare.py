"""Comparison of two checkpoints of one model, whatever their stored forms."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from dsv3_jax.checkpoint.arrays import Progress, ignore_progress, run_in_threads
from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table
from dsv3_jax.checkpoint.verify import Scans, sum_of_squares

_CONVERTED_FIELDS = ("dtype", "quantization")  # config fields that a conversion may change


@dataclasses.dataclass
class Difference:
    """Difference between a tensor of A and the same tensor of B, or the sum over several."""

    tensors: int = 0
    equal_bytes: int = 0  # tensors with the same dtype and bytes, including their scales
    largest: float = 0.0  # max |a - b|
    squares: float = 0.0  # sum (a - b)^2
    of_a: float = 0.0  # sum a^2

    @property
    def relative_rms(self) -> float | None:
        """sqrt(sum (a - b)^2 / sum a^2). None if a is all zeros and b is not."""
        if not self.of_a:
            return None if self.squares else 0.0
        return math.sqrt(self.squares / self.of_a)

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Adds values of a tensor that is counted already."""
        difference = a - b
        self.largest = max(self.largest, float(difference.max()), -float(difference.min()))
        self.squares += sum_of_squares(difference)
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
    """Result of :func:`compare`."""

    differences: dict[str, Difference]  # of each tensor that both have, by published name
    first_difference: str | None  # line about the first tensor or config field that differs
    source_hashes: int | None
    """Number of A's tensors with the hashes of the source that B's manifest records. None if B is
    not a store, or was made from another source."""
    findings: list[str]  # reasons why they are not two complete checkpoints of one model


def compare(
    a: OpenCheckpoint, b: OpenCheckpoint, *, workers: int = 1, progress: Progress = ignore_progress
) -> Comparison:
    """Reads two checkpoints once, compares their values, and checks each as :func:`verify` does.

    Values are compared in float32, after dequantization. If B is a store and more than half of A's
    tensors have the hashes of its recorded source, A is regarded as that source. Each of the other
    tensors is then a finding.
    """
    scans_a, scans_b = Scans(a, progress), Scans(b, progress)
    findings, names = _compare_shapes(a, b)

    differences = {name: Difference(tensors=1) for name in names}
    lines: dict[str, str] = {}

    def compare_tensor(name: str) -> None:
        scan_a, scan_b, difference = scans_a.scan(name), scans_b.scan(name), differences[name]
        rows = math.lcm(scan_a.row_multiple, scan_b.row_multiple)
        # If reading one of them fails, the rest of the other is not needed.
        for part_a, part_b in zip(scan_a.parts(rows), scan_b.parts(rows), strict=False):
            difference.add(part_a, part_b)
        scans_a.add_result(scan_a)
        scans_b.add_result(scan_b)
        same_form = scan_a.dtypes == scan_b.dtypes
        if same_form and scan_a.digests() == scan_b.digests():
            difference.equal_bytes = 1
        elif difference.largest:
            lines[name] = f"{name}: differs by up to {difference.largest:.3g}"
        elif same_form:
            lines[name] = f"{name}: other bytes, though of the same values"

    run_in_threads(workers, compare_tensor, names)
    for scans, checkpoint in ((scans_a, a), (scans_b, b)):
        scans.hash_others()
        findings += [f"{line} (in {checkpoint.directory})" for line in scans.findings()]
    source_hashes, changed = _compare_with_source(b, scans_a.digests)
    first = next((lines[name] for name in names if name in lines), None)
    first = first or _config_difference(a, b)
    return Comparison(differences, first, source_hashes, findings + changed)


def _compare_shapes(a: OpenCheckpoint, b: OpenCheckpoint) -> tuple[list[str], list[str]]:
    """Returns findings about names and shapes, and the names of the tensors to compare."""
    shapes_a, shapes_b = _shapes(a), _shapes(b)
    may_be_absent = {*copies(a.config), *copies(b.config)}
    findings = []
    for name in shapes_a | shapes_b:
        if name in may_be_absent and not (name in shapes_a and name in shapes_b):
            continue
        if name not in shapes_b:
            findings.append(f"{name}: expected as in {a.directory}, not in {b.directory}")
        elif name not in shapes_a:
            findings.append(f"{name}: in {b.directory}, and not in {a.directory}")
        elif shapes_a[name] != shapes_b[name]:
            findings.append(f"{name}: expected shape {shapes_a[name]}, got {shapes_b[name]}")
    readable_in_b = set(b.readable_weights())
    names = [
        name
        for name in a.readable_weights()
        if name in readable_in_b and shapes_a[name] == shapes_b[name]
    ]
    return findings, names


def _shapes(checkpoint: OpenCheckpoint) -> dict[str, tuple[int, ...]]:
    """Returns the unpacked shapes of the tensors in a checkpoint, without scales."""
    plain = dataclasses.replace(checkpoint.config, quantization=None)
    table = tensor_table(plain)
    return {name: spec.shape for name, spec in table.items() if name in checkpoint.arrays}


def _config_difference(a: OpenCheckpoint, b: OpenCheckpoint) -> str | None:
    for field in dataclasses.fields(a.config):
        expected, got = (getattr(side.config, field.name) for side in (a, b))
        if expected != got and field.name not in _CONVERTED_FIELDS:
            return f"config: {field.name}: expected {expected}, got {got}"
    return None


def _compare_with_source(
    b: OpenCheckpoint, digests: dict[str, str]
) -> tuple[int | None, list[str]]:
    """Returns the number of hashes that equal those of the source of store ``b``, and a finding for
    each other one; or ``(None, [])`` if ``b`` is not a store or fewer than half are equal."""
    if b.manifest is None:
        return None, []
    recorded = {n: e.hash for n, e in b.manifest.source.items() if n in digests}
    changed = [name for name, hash in recorded.items() if digests[name] != hash]
    if 2 * len(changed) >= len(recorded):
        return None, []
    lines = [f"{n}: no longer has the bytes that {b.directory} was made from" for n in changed]
    return len(recorded) - len(changed), lines
