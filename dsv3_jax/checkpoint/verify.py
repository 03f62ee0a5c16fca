"""Verification of a checkpoint: its tensors by name, all their values, and a store's hashes.

The files are read once. Each tensor is processed by one thread, in pieces of at most
``PIECE_ELEMENTS`` elements. A piece is converted to float32 in parts of a few hundred thousand
values. No other memory is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from dsv3_jax.checkpoint.arrays import (
    Arrays,
    LazyArray,
    Progress,
    as_bytes,
    columns_per_element,
    digest,
    ignore_progress,
    nbytes,
    pieces,
    run_in_threads,
)
from dsv3_jax.checkpoint.check import copy_mismatch, is_uncounted_mtp_tensor, tensor_problems
from dsv3_jax.checkpoint.formats import dequantize
from dsv3_jax.checkpoint.manifest import FOLDER, small_file_hashes
from dsv3_jax.checkpoint.open_checkpoint import OpenCheckpoint
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table
from dsv3_jax.quantization import Quantization
from dsv3_jax.words import os_error_message

_FLOAT32 = np.dtype(np.float32)
_PART_ELEMENTS = 2**18  # so that a float32 part stays in the CPU's cache


class Faults:
    """Bad elements of one kind in a tensor: their number and the position of the first."""

    def __init__(self, kind: str):
        self.kind = kind  # description for messages, such as ``"NaN or infinity"``
        self.count = 0  # number of bad elements so far
        self._first: list[int] = []

    def add(self, is_bad: np.ndarray, first_row: int) -> None:
        """Adds the bad elements of consecutive rows, given as a mask that begins at a row."""
        if not self.count:
            row, *others = (int(i) for i in np.unravel_index(is_bad.argmax(), is_bad.shape))
            self._first = [first_row + row, *others]
        self.count += int(is_bad.sum())

    def __str__(self) -> str:
        more = f" and {self.count - 1:,} more" if self.count > 1 else ""
        return f"{self.kind} at {self._first}{more}"


class RowReader:
    """Reads the rows of an array in order, hashes their bytes and reports the progress."""

    def __init__(self, name: str, array: LazyArray, progress: Progress):
        self.name = name
        self.array = array
        self.hasher = xxhash.xxh3_128()
        self.rows_read = 0
        self._progress = progress

    def read(self, rows: slice) -> np.ndarray:
        """Reads the next rows."""
        part = self.array[rows]
        self.hasher.update(as_bytes(part))
        self.rows_read += len(part)
        self._progress(part.nbytes)
        return part


class ScaleScan:
    """Reads the scales of a matrix once, in order, and applies them to the stored values."""

    def __init__(self, name: str, array: LazyArray, block: tuple[int, int], progress: Progress):
        self.reader = RowReader(name, array, progress)
        self.range: tuple[float, float] | None = None  # smallest and largest above 0 so far
        self.rows_per_scale = block[0]  # number of matrix rows per row of scales
        self._block = block
        self._bad_scales = Faults("expected finite scales above 0, got another")
        self._bad_zeros = Faults("a scale of 0 over weights that are not 0")

    def read(self, rows: slice) -> np.ndarray:
        """Reads the float32 scales of the next matrix rows, which begin a block. One that is not
        finite is a finding, and is returned as the smallest positive number: 0 could cause another
        finding."""
        first = rows.start // self.rows_per_scale
        stored = self.reader.read(slice(first, -(-rows.stop // self.rows_per_scale)))
        scale = stored.astype(np.float32)
        valid = np.isfinite(scale) & (scale >= 0)
        if not valid.all():
            self._bad_scales.add(~valid, first)
        if (positive := scale[valid & (scale > 0)]).size:
            low, high = self.range or (math.inf, 0.0)
            self.range = min(low, float(positive.min())), max(high, float(positive.max()))
        return np.where(np.isfinite(scale), scale, np.finfo(np.float32).tiny)

    def dequantize(
        self, values: np.ndarray, scale: np.ndarray, first_row: int, offset: int
    ) -> np.ndarray:
        """Returns the float32 values of rows that begin a block, ``offset`` rows into the piece
        that begins at ``first_row`` of the matrix. ``scale`` has the scales of the piece, from
        :meth:`read`."""
        first = offset // self.rows_per_scale
        scale = scale[first : -(-(offset + len(values)) // self.rows_per_scale)]
        if not scale.all():
            # Only blocks with a scale of 0 keep their values here.
            is_zero = (scale == 0).astype(np.float32)
            unscaled = np.nan_to_num(dequantize(values, is_zero, self._block, _FLOAT32))
            if unscaled.any():
                blocks = unscaled != 0
                for axis, size in enumerate(self._block):
                    edges = range(0, blocks.shape[axis], size)
                    blocks = np.logical_or.reduceat(blocks, edges, axis=axis)
                self._bad_zeros.add(blocks, (first_row + offset) // self.rows_per_scale)
        return dequantize(values, scale, self._block, _FLOAT32)

    def findings(self) -> list[str]:
        """Returns one line per kind of bad scale."""
        faults = (self._bad_scales, self._bad_zeros)
        return [f"{self.reader.name}: {each}" for each in faults if each.count]


class Scan:
    """Reads a tensor once, together with its scales if it is quantized."""

    def __init__(
        self, name: str, arrays: Arrays, quantization: Quantization | None, progress: Progress
    ):
        self.name = name
        self.shape = arrays[name].shape  # shape of the values, after unpacking
        self.scales: ScaleScan | None = None  # scales of the tensor. None if it is not quantized.
        self._values = RowReader(name, arrays[name], progress)
        self._readers = [self._values]
        self.row_multiple = 1  # number of rows per scale. Every part begins at a multiple of it.
        self._nonfinite = Faults("NaN or infinity")
        self._error: OSError | None = None  # failure that ended the pass early
        if quantization is None or (scale := arrays.get(name + quantization.scale_suffix)) is None:
            return
        rows, columns = self.shape
        self.shape = (rows, columns * columns_per_element(arrays[name].dtype))
        block = quantization.block_shape(self.shape[1])
        self.scales = ScaleScan(name + quantization.scale_suffix, scale, block, progress)
        self._readers.append(self.scales.reader)
        self.row_multiple = self.scales.rows_per_scale

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """Stored dtypes of the tensor and its scales."""
        return tuple(reader.array.dtype for reader in self._readers)

    def parts(self, multiple: int) -> Iterator[np.ndarray]:
        """Yields all values in order as float32 rows, with 0 for NaN and infinity. Parts begin at
        multiples of ``multiple`` rows, a multiple of :attr:`row_multiple`. A disk failure ends the
        iteration early and becomes a finding."""
        width = math.prod(self.shape[1:])
        step = max(_PART_ELEMENTS // width // multiple * multiple, multiple)
        # Pieces have at least 128 rows, as chunks of a store do.
        for rows in pieces(self.shape, multiple * max(1, 128 // multiple)):
            try:
                values = self._values.read(rows)
                scale = self.scales.read(rows) if self.scales is not None else None
            except OSError as error:
                self._error = error
                return
            for first in range(0, len(values), step):
                part = self._float32(values[first : first + step], scale, rows.start, first)
                finite = np.isfinite(part)
                if not finite.all():
                    self._nonfinite.add(~finite, rows.start + first)
                    part[~finite] = 0
                yield part

    def digests(self) -> dict[str, str]:
        """Returns the hashes of tensor and scales by name. Empty unless all values were read."""
        if self._error is not None or self._values.rows_read != self._values.array.shape[0]:
            return {}
        return {reader.name: reader.hasher.hexdigest() for reader in self._readers}

    def findings(self) -> list[str]:
        """Returns one line per kind of problem with the values."""
        lines = [f"{self.name}: {self._nonfinite}"] if self._nonfinite.count else []
        lines += self.scales.findings() if self.scales is not None else []
        return lines if self._error is None else [*lines, unreadable(self.name, self._error)]

    def _float32(
        self, values: np.ndarray, scale: np.ndarray | None, first_row: int, offset: int
    ) -> np.ndarray:
        """Converts the rows from ``offset`` on of the piece that begins at ``first_row``."""
        # An overflow becomes infinity, which is a finding.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.scales is None or scale is None:
                return values.astype(np.float32)
            return self.scales.dequantize(values, scale, first_row, offset)


def unreadable(name: str, error: OSError) -> str:
    """Returns the finding for a tensor that cannot be read."""
    return f"{name}: cannot be read: {os_error_message(error)}"


@dataclasses.dataclass
class ValueStats:
    """Statistics of the dequantized values of one or several tensors."""

    tensors: int = 0
    values: int = 0
    largest: float = 0.0  # max |w|
    squares: float = 0.0  # sum w^2
    scales: tuple[float, float] | None = None  # smallest and largest scale above 0, if any

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
    stats: dict[str, ValueStats]  # by published name. Those of a weight include its scales.
    findings: list[str]  # problems, one line each with the name of the tensor


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
        self.digests: dict[str, str] = {}  # hashes of the tensors read so far, by name
        self._checkpoint = checkpoint
        self._progress = progress
        self._findings: dict[str, list[str]] = {}
        self._scales: dict[str, str] = {}  # weight of each scale that the config has, by name
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
        recorded, present = manifest.kept, small_file_hashes(self._checkpoint.directory)
        for name in recorded | present:
            if recorded.get(name) != present.get(name):
                expected = recorded.get(name, "no such file")
                got = present.get(name, "no such file")
                lines.append(f"{FOLDER}/{name}: expected hash {expected}, got {got}")
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
