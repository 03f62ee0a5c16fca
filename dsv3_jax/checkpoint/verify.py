"""Verification of a checkpoint: its tensors by name, all their values, and a store's hashes.

The files are read once. Each tensor is processed by one thread.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from dsv3_jax.checkpoint import sidecar
from dsv3_jax.checkpoint.arrays import Progress, digest, ignore_progress, nbytes, run_in_threads
from dsv3_jax.checkpoint.check import copy_mismatch, is_uncounted_mtp_tensor, tensor_problems
from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint
from dsv3_jax.checkpoint.scan import Scan, unreadable
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table


@dataclasses.dataclass
class ValueStats:
    """Statistics of the dequantized values of one or several tensors."""

    tensors: int = 0
    values: int = 0
    largest: float = 0.0
    """max |w|"""
    squares: float = 0.0
    """sum w^2"""
    scales: tuple[float, float] | None = None
    """Smallest and largest scale above 0. None if no tensor is quantized."""

    @property
    def rms(self) -> float:
        """sqrt(mean w^2)"""
        return math.sqrt(self.squares / max(self.values, 1))

    def add(self, part: np.ndarray) -> None:
        """Adds values of a tensor that is counted already."""
        self.values += part.size
        self.largest = max(self.largest, float(part.max()), -float(part.min()))
        self.squares += sum_of_squares(part)

    def __add__(self, other: ValueStats) -> ValueStats:
        ranges = [scales for scales in (self.scales, other.scales) if scales is not None]
        return ValueStats(
            self.tensors + other.tensors,
            self.values + other.values,
            max(self.largest, other.largest),
            self.squares + other.squares,
            (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None,
        )


class Verification(NamedTuple):
    """Result of :func:`verify`."""

    tensors: int
    nbytes: int
    stats: dict[str, ValueStats]
    """Statistics by published name. Those of a weight include its scales."""
    findings: list[str]
    """Problems, one line each with the name of the tensor."""


def verify(
    checkpoint: OpenCheckpoint, *, workers: int = 1, progress: Progress = ignore_progress
) -> Verification:
    """Reads every value of a checkpoint once and checks it.

    * Names, shapes and dtypes are those of the config.
    * Weights are finite. Scales are finite and above 0, or 0 for a block of zeros.
    * The copies of embedding and head in MTP layers equal their originals.
    * The tensors and small files of a store have the hashes in its manifest.

    Like :func:`dsv3_jax.load`, it accepts MTP layers that the config does not count. They are
    hashed, but their values are not checked.

    Args:
      workers: number of threads. Each has one piece of a tensor in memory.
      progress: called with the number of bytes after each read, :func:`total_bytes` in all.
    """
    scans = Scans(checkpoint, progress)
    stats = {name: ValueStats(tensors=1) for name in checkpoint.readable_weights()}

    def scan_tensor(name: str) -> None:
        scan = scans.scan(name)
        for part in scan.parts(scan.row_multiple):
            stats[name].add(part)
        stats[name].scales = scan.scales.range if scan.scales is not None else None
        scans.add_result(scan)

    run_in_threads(workers, scan_tensor, list(stats))
    scans.hash_others()
    size = total_bytes(checkpoint)
    return Verification(len(checkpoint.arrays), size, stats, scans.findings())


class Scans:
    """All scans of one pass over a checkpoint, and their results. Safe to use from any thread."""

    def __init__(self, checkpoint: OpenCheckpoint, progress: Progress):
        self.digests: dict[str, str] = {}
        """Hashes of the tensors read so far, by name."""
        self._checkpoint = checkpoint
        self._progress = progress
        self._findings: dict[str, list[str]] = {}
        self._scales: dict[str, str] = {}
        """Names of the scales that the config has -> name of the weight."""
        if (quantization := checkpoint.config.quantization) is not None:
            table = tensor_table(checkpoint.config)
            weights = {weight + quantization.scale_suffix: weight for weight in table}
            self._scales = {scale: weight for scale, weight in weights.items() if scale in table}

    def scan(self, name: str) -> Scan:
        """Returns a new scan of a tensor."""
        quantization = self._checkpoint.config.quantization
        # A scale of any other tensor is unknown, and does not change its values.
        if quantization is not None and name + quantization.scale_suffix not in self._scales:
            quantization = None
        return Scan(name, self._checkpoint.arrays, quantization, self._progress)

    def add_result(self, scan: Scan) -> None:
        """Records the hashes and findings of a scan that has ended."""
        self.digests.update(scan.digests())
        self._findings[scan.name] = scan.findings()

    def hash_others(self) -> None:
        """Hashes the tensors without a scan: those that no model reads, or that are malformed."""
        for name, array in self._checkpoint.arrays.items():
            weight = self._scales.get(name, name)
            if name in self.digests or weight in self._findings:
                continue
            try:
                self.digests[name] = digest(array)
            except OSError as error:
                self._findings[name] = [unreadable(name, error)]
            self._progress(nbytes(array))

    def findings(self) -> list[str]:
        """Returns one line per problem: with names and shapes, values, MTP copies, and hashes."""
        config, arrays = self._checkpoint.config, self._checkpoint.arrays
        missing, unknown, mismatched = tensor_problems(config, arrays)
        unknown = [name for name in unknown if not is_uncounted_mtp_tensor(config, arrays, name)]
        lines = [f"{name}: missing" for name in missing] + mismatched
        lines += [f"{name}: unknown, not a tensor of this config" for name in unknown]
        for name in arrays:
            lines += self._findings.get(name, [])
        for name, original in copies(config).items():
            got = self.digests.get(name)
            if got is not None and got != self.digests.get(original, got):
                lines.append(copy_mismatch(name, original))
        return lines + self._manifest_findings()

    def _manifest_findings(self) -> list[str]:
        """Compares the hashes of tensors and small files with a store's manifest."""
        manifest = self._checkpoint.manifest
        if manifest is None:
            return []
        lines = []
        for name, record in manifest.tensors.items():
            if (got := self.digests.get(name, record.hash)) != record.hash:
                lines.append(f"{name}: expected hash {record.hash}, got {got}")
        recorded, present = manifest.kept, sidecar.hashes(self._checkpoint.directory)
        for name in recorded | present:
            if recorded.get(name) != present.get(name):
                expected = recorded.get(name, "no such file")
                got = present.get(name, "no such file")
                lines.append(f"{sidecar.FOLDER}/{name}: expected hash {expected}, got {got}")
        return lines


def total_bytes(checkpoint: OpenCheckpoint) -> int:
    """Returns the size of all tensors in bytes."""
    return sum(map(nbytes, checkpoint.arrays.values()))


def sum_of_squares(part: np.ndarray) -> float:
    """Returns the sum of squares in float64, because float32 squares over- and underflow."""
    total = 0.0
    flat = part.reshape(-1)
    for first in range(0, flat.size, 2**15):  # so that float64 values stay in the CPU's cache
        wide = flat[first : first + 2**15].astype(np.float64)
        total += float(np.einsum("i,i->", wide, wide))
    return total
