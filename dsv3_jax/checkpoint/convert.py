"""Conversion of a published checkpoint to a store: streamed, resumable, and read back.

A store is a directory with these entries:

* ``manifest.json``: content and source of the store. It is written last and marks the store as
  complete.
* ``weights/``: an orbax checkpoint with one array per parameter and experts stacked.
* ``source/``: config.json, tokenizer and the other small files of the source, and the headers of
  its shards, from which ``dsv3 export`` reproduces the original files.
* ``journal.jsonl``: the completed units of work. It exists only until the store is complete.

Two conversions of the same files produce the same bytes, however often they were interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import dsv3_jax
from dsv3_jax.checkpoint import array_tree, journal, manifest
from dsv3_jax.checkpoint.arrays import Progress, digest, ignore_progress, nbytes, run_in_threads
from dsv3_jax.checkpoint.check import check_copy
from dsv3_jax.checkpoint.conversion_plan import (
    ConversionPlan,
    Target,
    Unit,
    convert_unit,
    plan_conversion,
    stored_hashes,
)
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.journal import ConversionJournal
from dsv3_jax.checkpoint.manifest import Manifest, QuantizationLoss, SourceFile, TensorRecord
from dsv3_jax.checkpoint.reader import SPELLED, SafetensorsFile
from dsv3_jax.checkpoint.store import WEIGHTS, ArrayFiles
from dsv3_jax.files import check_free, remove_partial_files, sync_tree
from dsv3_jax.words import os_error_message

RESUME_HINT = "finished units are kept; the same command with --resume continues with them"


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: Target = "fp8",
    *,
    resume: bool = False,
    workers: int = 2,
    progress: Progress | None = None,
) -> Manifest:
    """Converts a published checkpoint to a store that :func:`dsv3_jax.load` reads.

    The source is only read. ``fp8`` keeps every byte of a float8 source, and quantizes others in
    blocks of 128x128. ``int8`` has one scale per row, ``int4`` one per 128 columns of a row.
    Tensors that published checkpoints never quantize remain in bfloat16 or float32.

    Args:
      source: Hugging Face directory, Hub name, or ``"demo"``.
      destination: new directory. With ``resume`` it may also be an unfinished store.
      resume: continue an interrupted conversion.
      workers: number of units to convert at once.
      progress: called from several threads with numbers of converted bytes of the source.

    Returns:
      The manifest of the store.

    Raises:
      ValueError: the source is damaged or incomplete, the destination must not be written to, or
        the disk is full or failed. Completed units are kept for ``resume``.
    """
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    planned, store = plan_conversion(find(source), to), Path(destination)
    check_destination(planned, store, resume)
    if (store / manifest.NAME).is_file():
        return _existing_manifest(planned, store)
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(os_error_message(error)) from None
    try:
        with ConversionJournal(store) as log:
            if (store / manifest.NAME).is_file():  # another process has just finished
                return _existing_manifest(planned, store)
            return _Conversion(planned, store, log, workers, progress or ignore_progress).run()
    except OSError as error:
        raise ValueError(f"{os_error_message(error)}; {RESUME_HINT}") from None


def check_destination(planned: ConversionPlan, store: Path, resume: bool) -> None:
    """Raises ValueError if ``store`` contains anything but this conversion, overlaps the source, or
    is on a disk with too little space."""
    source, target = planned.directory.resolve(), store.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ValueError(f"{store}: expected a directory apart from the source {planned.directory}")
    if store.is_symlink() and not store.exists():
        raise ValueError(f"{store}: expected a directory, got a symbolic link to nothing")
    if store.exists() and not store.is_dir():
        raise ValueError(f"{store}: expected a directory, got a file")
    present = {path.name for path in store.iterdir()} if store.is_dir() else set()
    markers = {manifest.NAME, journal.NAME} & present
    if present and not markers:
        raise ValueError(f"{store}: expected a new directory, got one with other files")
    if markers and not resume:
        state = "a complete store" if manifest.NAME in present else "an unfinished conversion"
        raise ValueError(f"{store}: contains {state}; expected a new directory, or --resume")
    for folder, folders, files in os.walk(store):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):  # writing would follow it
                raise ValueError(
                    f"{os.path.join(folder, name)}: a symbolic link; expected a store without links"
                )
    written = sum(p.stat().st_size for p in (store / WEIGHTS).rglob("*") if p.is_file())
    if manifest.NAME not in present:
        check_free(store, planned.store_bytes - written)


def _existing_manifest(planned: ConversionPlan, store: Path) -> Manifest:
    """Returns the manifest of a complete store, after checking that it is this conversion's."""
    existing = manifest.read(store)
    recorded = {"to": existing.to, "files": existing.files, "config": existing.config}
    _check_same_conversion(store, _identity(planned), recorded)
    # A process that was killed after writing the manifest leaves its journal.
    (store / journal.NAME).unlink(missing_ok=True)
    return existing


def _identity(planned: ConversionPlan) -> dict[str, Any]:
    """Returns target and source in JSON types. They must not change when a conversion resumes."""
    return {
        "to": planned.to,
        "config": json.loads((planned.directory / "config.json").read_bytes()),
        "files": {
            file.path.name: [file.size, hashlib.sha256(file.header).hexdigest()]
            for file in _shards(planned)
        },
    }


def _check_same_conversion(store: Path, now: dict[str, Any], recorded: Mapping[str, Any]) -> None:
    """Refuses a target or source that differs from the recorded one."""
    if now["to"] != recorded.get("to"):
        raise ValueError(
            f"{store}: was begun with --to {recorded.get('to')}, cannot continue with"
            f" --to {now['to']}"
        )
    files = {name: list(file) for name, file in recorded.get("files", {}).items()}
    changed = sorted(n for n in {*now["files"], *files} if now["files"].get(n) != files.get(n))
    if now["config"] != recorded.get("config"):
        changed.insert(0, "config.json")
    if changed:
        raise ValueError(
            f"{changed[0]}: this file differs from the one that {store} was begun from"
        )


def _shards(planned: ConversionPlan) -> list[SafetensorsFile]:
    return list({id(t.file): t.file for t in planned.source.values()}.values())


class _Conversion:
    """A conversion into a store that this process has locked."""

    def __init__(
        self,
        planned: ConversionPlan,
        store: Path,
        log: ConversionJournal,
        workers: int,
        progress: Progress,
    ):
        self.plan, self.store, self.log, self.workers = planned, store, log, workers
        self.progress = progress
        self.files = ArrayFiles(store / WEIGHTS, workers)
        self.identity = _identity(planned)
        self.stats = self._file_stats()
        """Modification times and inodes of the source's files, when the conversion began."""

    def run(self) -> Manifest:
        """Converts all units that the journal does not list, and completes the store."""
        self._begin()
        self.files.remove_unfinished()
        remove_partial_files(self.store)
        array_tree.create(self.store / WEIGHTS, self.plan.arrays.values())
        manifest.copy_small_files(
            self.plan.directory, self.plan.source, self.plan.unused, self.store
        )
        done, units = self.log.done, self.plan.units
        run_in_threads(
            self.workers, self._check_written, [unit for unit in units if unit.key in done]
        )
        run_in_threads(
            self.workers, self._check_copy, [copy for copy in self.plan.copies if copy not in done]
        )
        run_in_threads(
            self.workers,
            lambda unit: self.log.add(convert_unit(self.plan, unit, self.files, self.progress)),
            [unit for unit in units if unit.key not in done],
        )
        self._check_source()
        complete = self._manifest()
        sync_tree(self.store)
        manifest.write(self.store, complete)
        self.log.path.unlink()
        return complete

    def _file_stats(self) -> dict[str, list[int]]:
        """Returns numbers that change when a file of the source is written, replaced or moved."""
        stats = {file.path.name: file.path.stat() for file in _shards(self.plan)}
        return {n: [s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for n, s in stats.items()}

    def _begin(self) -> None:
        """Records source and target in a new journal, or compares them with an existing one."""
        if not self.log.lines:
            shutil.rmtree(self.store / WEIGHTS, ignore_errors=True)
            self.log.add({**self.identity, "stats": self.stats})
            return
        _check_same_conversion(self.store, self.identity, self.log.lines[0])
        self._check_journal()
        recorded = next(line["stats"] for line in reversed(self.log.lines) if "stats" in line)
        touched = {name for name, stat in self.stats.items() if stat != recorded.get(name)}
        if touched:  # perhaps only moved
            self._check_touched(touched)

    def _check_touched(self, files: set[str]) -> None:
        """Compares the tensors of these files with the hashes of what was read, and records the new
        stats of the files."""
        hashes, tensors = self._source_hashes(), self.plan.source
        run_in_threads(
            self.workers,
            lambda name: self._check_unchanged(name, hashes[name]),
            [name for name in hashes if tensors[name].file.path.name in files],
        )
        self.log.add({"stats": self.stats})

    def _check_source(self) -> None:
        """Refuses a source whose files changed while they were read. A hard link, a new name, mode
        or owner changes only a file's ctime, as a write with the old mtime does: such a file is
        read again."""
        while (now := self._file_stats()) != self.stats:
            before, self.stats = self.stats, now
            touched = {name for name, stat in now.items() if stat != before[name]}
            for name in sorted(touched):
                if (now[name][0], now[name][2]) != (before[name][0], before[name][2]):
                    raise ValueError(
                        f"{self.plan.directory / name}: was written or replaced while it was read"
                    )
            self._check_touched(touched)

    def _check_journal(self) -> None:
        """Checks that the journal's lines are about tensors and units of this plan. Lines about
        unknown units are ignored, and their tensors are converted again."""
        units = {unit.key: unit for unit in self.plan.units}
        for key, line in self.log.done.items():
            read, unit = set(line["source"]), units.get(key)
            is_valid = read <= self.plan.source.keys()
            if unit is not None:
                is_valid &= read == self.plan.inputs(unit)
                is_valid &= ("error" in line) == (unit.scales is not None)
            elif key in self.plan.copies:
                is_valid &= read == {key} and not line["stored"]
            if not is_valid:
                raise self.log.damaged(line)

    def _check_unchanged(self, name: str, recorded: str) -> None:
        tensor = self.plan.source[name]
        if digest(tensor) != recorded:
            raise ValueError(
                f"{tensor.file.path.name}: {name} has changed since it was converted to "
                f"{self.store}; begin again with a new directory"
            )

    def _check_written(self, unit: Unit) -> None:
        """Compares a unit of an earlier process with its hashes, and redoes it if they differ."""
        line = self.log.done[unit.key]
        try:
            is_intact = stored_hashes(unit, self.files) == line["stored"]
        except OSError:
            is_intact = False
        if is_intact:
            self.progress(sum(nbytes(self.plan.source[name]) for name in line["source"]))
        else:
            self.log.add({"undo": unit.key})

    def _check_copy(self, copy: str) -> None:
        """Checks that an MTP layer's copy equals its original. The store does not contain it."""
        got = check_copy(self.plan.source, copy, self.plan.copies[copy])
        self.log.add({"unit": copy, "source": {copy: got}, "stored": {}})
        self.progress(nbytes(self.plan.source[copy]))

    def _source_hashes(self) -> dict[str, str]:
        """Returns the hashes of all source tensors read so far, by name."""
        return {n: h for line in self.log.done.values() for n, h in line["source"].items()}

    def _manifest(self) -> Manifest:
        done = self.log.done
        source = self._source_hashes()
        source |= {name: digest(self.plan.source[name]) for name in self.plan.unused}
        stored = {name: h for line in done.values() for name, h in line["stored"].items()}
        return Manifest(
            tool=f"dsv3_jax {dsv3_jax.__version__}",
            to=self.plan.to,
            config=self.identity["config"],
            dtype=self.plan.config.dtype,
            quantization=self.plan.config.quantization,
            num_nextn_predict_layers=self.plan.config.num_nextn_predict_layers,
            files={n: SourceFile(*file) for n, file in sorted(self.identity["files"].items())},
            kept=manifest.small_file_hashes(self.store),
            source={
                name: TensorRecord(SPELLED[t.dtype], list(t.shape), source[name], t.file.path.name)
                for name, t in self.plan.source.items()
            },
            tensors={
                name: TensorRecord(SPELLED[array.dtype], list(array.tensor_shape), stored[name])
                for array in self.plan.arrays.values()
                for name in array.tensors
            },
            errors=_losses([done[u.key]["error"] for u in self.plan.units if u.scales is not None]),
        )


def _losses(sums: Iterable[Mapping[str, Any]]) -> dict[str, QuantizationLoss]:
    """Adds up the sums of all units by tensor kind, in the order of the units."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for unit in sums:
        kinds.setdefault(unit["kind"], []).append(unit)
    return {
        kind: QuantizationLoss(
            tensors=sum(u["tensors"] for u in units),
            relative_rms=math.sqrt(
                sum(u["error"] for u in units) / (sum(u["weight"] for u in units) or 1.0)
            ),
            largest=max(u["largest"] for u in units),
            largest_weight=max(u["largest_weight"] for u in units),
        )
        for kind, units in kinds.items()
    }
