"""Whether a checkpoint is whole: its tensors by name, all values, and for a store every hash.

One pass over the files, each tensor in the hands of one thread.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from dsv3_jax.checkpoint import sidecar
from dsv3_jax.checkpoint.arrays import digest
from dsv3_jax.checkpoint.check import differences, is_left_out
from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint
from dsv3_jax.checkpoint.scan import Scan, nbytes, unreadable
from dsv3_jax.checkpoint.tensor_table import copies
from dsv3_jax.checkpoint.threads import Progress, in_threads


@dataclasses.dataclass
class ValueStats:
    """What the values of a tensor, or of many, add up to. Scales are applied."""

    tensors: int = 0
    values: int = 0
    largest: float = 0.0
    """max |w|"""
    squares: float = 0.0
    """sum w^2"""
    scales: tuple[float, float] | None = None
    """Smallest and largest of the scales above 0."""

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.values, 1))

    def add(self, part: np.ndarray) -> None:
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
    """What a pass over a checkpoint found."""

    tensors: int
    nbytes: int
    stats: dict[str, ValueStats]
    """Of each tensor by its published name, a weight's with its scale."""
    findings: list[str]
    """What is wrong, a line each with the name of the tensor."""


def verify(
    checkpoint: OpenCheckpoint, *, workers: int = 1, count: Progress = lambda n: None
) -> Verification:
    """Reads every value once.

    Names, shapes and dtypes are those of the config; weights are finite, scales finite and above
    0, or 0 over zeros; copies that MTP layers carry repeat their originals; and a store's tensors
    hash to what its manifest says. MTP layers that the config does not count may be there: as
    :func:`dsv3_jax.load` leaves them out, they are read and their values not checked.

    Args:
      workers: threads. Each holds a piece of a tensor.
      count: is told of bytes as they are read, :func:`total_bytes` in all.
    """
    scans = Scans(checkpoint, count)
    figures = {name: ValueStats(tensors=1) for name in checkpoint.with_values()}

    def one(name: str) -> None:
        scan = scans.of(name)
        for part in scan.parts(scan.multiple):
            figures[name].add(part)
        figures[name].scales = scan.scale_range
        scans.done(scan)

    in_threads(workers, one, list(figures))
    scans.hash_others()
    size = total_bytes(checkpoint)
    return Verification(len(checkpoint.arrays), size, figures, scans.findings())


class Scans:
    """The scans of one pass over a checkpoint, and what they find; from any thread.

    Attributes:
      digests: of the tensors that were read, by name.
    """

    def __init__(self, checkpoint: OpenCheckpoint, count: Progress):
        self.digests: dict[str, str] = {}
        self._checkpoint = checkpoint
        self._count = count
        self._found: dict[str, list[str]] = {}

    def of(self, name: str) -> Scan:
        arrays, config = self._checkpoint.arrays, self._checkpoint.config
        return Scan(name, arrays, config.quantization, self._count)

    def done(self, scan: Scan) -> None:
        """All its parts were taken."""
        self.digests.update(scan.digests())
        self._found[scan.name] = scan.findings()

    def hash_others(self) -> None:
        """What has no values to scan: tensors that no model reads, or that are not as they should
        be."""
        for name, array in self._checkpoint.arrays.items():
            owner = name.removesuffix(_scale_suffix(self._checkpoint))
            if name in self.digests or owner in self._found:
                continue
            try:
                self.digests[name] = digest(array)
            except OSError as error:
                self._found[name] = [unreadable(name, error)]
            self._count(nbytes(array))

    def findings(self) -> list[str]:
        """A line each: of names, shapes and dtypes, of values, of copies, of hashes."""
        checkpoint, digests = self._checkpoint, self.digests
        config, arrays = checkpoint.config, checkpoint.arrays
        missing, unknown, out = differences(config, arrays)
        unknown = [name for name in unknown if not is_left_out(config, arrays, name)]
        out = [f"{name}: missing" for name in missing] + out
        out += [f"{name}: unknown, not a tensor of this config" for name in unknown]
        for name in arrays:
            out += self._found.get(name, [])
        for name, original in copies(config).items():
            if name in digests and digests[name] != digests.get(original, digests[name]):
                out.append(f"{name}: differs from {original}, which it should repeat")
        if checkpoint.manifest is not None:
            for name, entry in checkpoint.manifest.tensors.items():
                if (got := digests.get(name, entry.hash)) != entry.hash:
                    out.append(f"{name}: expected hash {entry.hash}, got {got}")
            kept, found = checkpoint.manifest.kept, sidecar.hashes(checkpoint.directory)
            for name in kept | found:
                if kept.get(name) != found.get(name):
                    was, now = kept.get(name, "no such file"), found.get(name, "no such file")
                    out.append(f"{sidecar.FOLDER}/{name}: expected hash {was}, got {now}")
        return out


def total_bytes(checkpoint: OpenCheckpoint) -> int:
    return sum(map(nbytes, checkpoint.arrays.values()))


def sum_of_squares(part: np.ndarray) -> float:
    """In float64: float32 squares over- and underflow within its range."""
    total = 0.0
    flat = part.reshape(-1)
    for first in range(0, flat.size, 2**15):  # conversions that stay in the CPU's cache
        wide = flat[first : first + 2**15].astype(np.float64)
        total += float(np.einsum("i,i->", wide, wide))
    return total


def _scale_suffix(checkpoint: OpenCheckpoint) -> str:
    quantization = checkpoint.config.quantization
    return quantization.scale_suffix if quantization is not None else ""
