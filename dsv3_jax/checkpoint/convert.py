"""From a published checkpoint to a store: streamed, resumable, read back, and then marked complete.

A store is a directory:

* ``manifest.json``: what it holds and where that came from. Written last: it marks a whole store.
* ``weights/``: an orbax checkpoint, one array a parameter, experts stacked.
* ``source/``: config.json, tokenizer and the other small files of the source, and the headers of
  its shards, from which ``dsv3 export`` makes the very files again.
* ``journal.jsonl``: what is done, while it is not whole.

Two conversions of the same files give the same bytes, however often they were interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dsv3_jax
from dsv3_jax.checkpoint import array_tree, journal, manifest, sidecar
from dsv3_jax.checkpoint.array_files import ArrayFiles
from dsv3_jax.checkpoint.arrays import digest
from dsv3_jax.checkpoint.conversion_plan import (
    ConversionPlan,
    Target,
    Unit,
    free_bytes,
    plan_conversion,
)
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.journal import Journal
from dsv3_jax.checkpoint.manifest import Error, Manifest, SourceFile, Tensor
from dsv3_jax.checkpoint.messages import os_error_message
from dsv3_jax.checkpoint.safetensors_file import SPELLED, SafetensorsFile
from dsv3_jax.checkpoint.store import WEIGHTS
from dsv3_jax.checkpoint.threads import Progress, in_threads
from dsv3_jax.checkpoint.unit_conversion import convert_unit, stored_hashes
from dsv3_jax.files import remove_partial_files, sync_tree

RESUME_HINT = "what is converted so far is kept, the same command with --resume continues it"


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

    The source is only read. Of a float8 source, ``fp8`` keeps every byte; of others it quantizes in
    blocks of 128x128. ``int8`` has a scale a row, ``int4`` one for 128 columns of a row. What no
    published checkpoint quantizes stays in bfloat16 or float32.

    Args:
      source: a directory as published, a Hub name, or ``"demo"``.
      destination: a new directory, or with ``resume`` perhaps one that was left unfinished.
      workers: tensors, or pieces of large ones, that are worked on at once.
      progress: is called with bytes of the source that are done, from several threads.

    Raises:
      ValueError: a source that is damaged or incomplete, a destination that is not to be written
        to, a disk that is full or fails. What is done by then is kept for ``resume``.
    """
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    planned, store = plan_conversion(find(source), to), Path(destination)
    check_destination(planned, store, resume)
    if (store / manifest.NAME).is_file():
        return _whole(planned, store)
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(os_error_message(error)) from None
    try:
        with Journal(store) as log:
            if (store / manifest.NAME).is_file():  # another process has just ended
                return _whole(planned, store)
            return _Run(planned, store, log, workers, progress or (lambda count: None)).all()
    except OSError as error:
        raise ValueError(f"{os_error_message(error)}; {RESUME_HINT}") from None


def check_destination(planned: ConversionPlan, store: Path, resume: bool) -> None:
    """Refuses to mix a conversion with anything that is there, or to fill the disk."""
    source, target = planned.directory.resolve(), store.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ValueError(f"{store}: expected a directory apart from the source {planned.directory}")
    if store.is_symlink() and not store.exists():
        raise ValueError(f"{store}: expected a directory, got a symbolic link to nothing")
    if store.exists() and not store.is_dir():
        raise ValueError(f"{store}: expected a directory, got a file")
    there = {path.name for path in store.iterdir()} if store.is_dir() else set()
    ours = {manifest.NAME, journal.NAME} & there
    if there and not ours:
        raise ValueError(f"{store}: expected a new directory, got one that holds other files")
    if ours and not resume:
        state = "a whole store" if manifest.NAME in there else "an unfinished conversion"
        raise ValueError(f"{store}: holds {state}; expected a new directory, or --resume")
    for folder, folders, files in os.walk(store):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):  # would be written through
                raise ValueError(
                    f"{os.path.join(folder, name)}: a symbolic link; expected a store that holds "
                    "none"
                )
    written = sum(p.stat().st_size for p in (store / WEIGHTS).rglob("*") if p.is_file())
    needed, free = planned.store_bytes - written, free_bytes(store)
    if manifest.NAME not in there and needed > free:
        raise ValueError(f"{store}: expected {needed:,} bytes of free disk, got {free:,}")


def _whole(planned: ConversionPlan, store: Path) -> Manifest:
    """The manifest of a store that is there already, if it is this conversion's."""
    made = manifest.read(store)
    _check_same(
        store, _identity(planned), {"to": made.to, "files": made.files, "config": made.config}
    )
    (store / journal.NAME).unlink(missing_ok=True)  # killed between the mark and the end
    return made


def _identity(planned: ConversionPlan) -> dict[str, Any]:
    """What must be the same for a conversion to go on: compared with JSON, so lists for tuples."""
    return {
        "to": planned.to,
        "config": json.loads((planned.directory / "config.json").read_bytes()),
        "files": {
            file.path.name: [file.size, hashlib.sha256(file.header).hexdigest()]
            for file in _shards(planned)
        },
    }


def _check_same(store: Path, now: dict[str, Any], then: Mapping[str, Any]) -> None:
    if now["to"] != then.get("to"):
        raise ValueError(f"{store}: began as --to {then.get('to')}, cannot go on --to {now['to']}")
    files = {name: list(file) for name, file in then.get("files", {}).items()}
    changed = sorted(n for n in {*now["files"], *files} if now["files"].get(n) != files.get(n))
    if now["config"] != then.get("config"):
        changed.insert(0, "config.json")
    if changed:
        raise ValueError(f"{changed[0]}: the source is not that of {store}: this file has changed")


def _shards(planned: ConversionPlan) -> list[SafetensorsFile]:
    return list({id(t.file): t.file for t in planned.source.values()}.values())


class _Run:
    """One process' part of a conversion."""

    def __init__(
        self, planned: ConversionPlan, store: Path, log: Journal, workers: int, progress: Progress
    ):
        self.plan, self.store, self.log, self.workers = planned, store, log, workers
        self.progress = progress
        self.files = ArrayFiles(store / WEIGHTS, workers)
        self.identity = _identity(planned)
        self.stats = self._stats()

    def all(self) -> Manifest:
        self._begin()
        self.files.remove_unfinished()
        remove_partial_files(self.store)
        array_tree.create(self.store / WEIGHTS, self.plan.arrays.values())
        sidecar.keep(self.plan.directory, self.plan.source, self.plan.unused, self.store)
        done, units = self.log.done, self.plan.units
        self._each(self._check_written, [unit for unit in units if unit.key in done])
        self._each(self._check_copy, [copy for copy in self.plan.copies if copy not in done])
        self._each(self._convert, [unit for unit in units if unit.key not in done])
        if self._stats() != self.stats:
            raise ValueError(f"{self.plan.directory}: its files changed while they were read")
        made = self._manifest()
        sync_tree(self.store)
        manifest.write(self.store, made)
        self.log.remove()
        return made

    def _stats(self) -> dict[str, list[int]]:
        """Changes whenever a file is written to, replaced or moved."""
        stats = {file.path.name: file.path.stat() for file in _shards(self.plan)}
        return {n: [s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for n, s in stats.items()}

    def _begin(self) -> None:
        """Says what this conversion is; or, where that is said, makes sure it still is."""
        if not self.log.lines:
            shutil.rmtree(self.store / WEIGHTS, ignore_errors=True)
            self.log.add({**self.identity, "stats": self.stats})
            return
        _check_same(self.store, self.identity, self.log.lines[0])
        self._check_lines()
        then = next(line["stats"] for line in reversed(self.log.lines) if "stats" in line)
        touched = {name for name, stat in self.stats.items() if stat != then.get(name)}
        if touched:
            # Perhaps only moved: what counts is that everything read so far reads the same.
            read = {n: h for line in self.log.done.values() for n, h in line["source"].items()}
            tensors = self.plan.source
            self._each(
                lambda name: self._check_unchanged(name, read[name]),
                [name for name in read if tensors[name].file.path.name in touched],
            )
            self.log.add({"stats": self.stats})

    def _check_lines(self) -> None:
        """The journal's lines are about the tensors and units of this plan. Units that it does not
        have are converted anew, whatever the journal says of them."""
        units = {unit.key: unit for unit in self.plan.units}
        for key, line in self.log.done.items():
            read, unit = set(line["source"]), units.get(key)
            good = read <= self.plan.source.keys()
            if unit is not None:
                good &= read == self.plan.read_for(unit)
                good &= ("error" in line) == (unit.scales is not None)
            elif key in self.plan.copies:
                good &= read == {key} and not line["stored"]
            if not good:
                raise self.log.damaged(line)

    def _check_unchanged(self, name: str, then: str) -> None:
        tensor = self.plan.source[name]
        if digest(tensor) != then:
            raise ValueError(
                f"{tensor.file.path.name}: {name} has changed since it was converted to "
                f"{self.store}; begin again with a new directory"
            )

    def _check_written(self, unit: Unit) -> None:
        """What an earlier process wrote may have been lost or spoiled since."""
        line = self.log.done[unit.key]
        try:
            good = stored_hashes(unit, self.files) == line["stored"]
        except OSError:
            good = False
        if good:
            self.progress(sum(self.plan.source[name].nbytes for name in line["source"]))
        else:
            self.log.add({"undo": unit.key})

    def _check_copy(self, copy: str) -> None:
        original = self.plan.copies[copy]
        found = digest(self.plan.source[copy])
        if found != digest(self.plan.source[original]):
            raise ValueError(f"{copy} differs from {original}, which it should repeat")
        self.log.add({"unit": copy, "source": {copy: found}, "stored": {}})
        self.progress(self.plan.source[copy].nbytes)

    def _convert(self, unit: Unit) -> None:
        self.log.add(convert_unit(self.plan, unit, self.files, self.progress))

    def _each(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        in_threads(self.workers, work, items)

    def _manifest(self) -> Manifest:
        done = self.log.done
        read = {name: h for line in done.values() for name, h in line["source"].items()}
        read |= {name: digest(self.plan.source[name]) for name in self.plan.unused}
        stored = {name: h for line in done.values() for name, h in line["stored"].items()}
        return Manifest(
            tool=f"dsv3_jax {dsv3_jax.__version__}",
            to=self.plan.to,
            config=self.identity["config"],
            dtype=self.plan.config.dtype,
            quantization=self.plan.config.quantization,
            num_nextn_predict_layers=self.plan.config.num_nextn_predict_layers,
            files={n: SourceFile(*file) for n, file in sorted(self.identity["files"].items())},
            kept=sidecar.hashes(self.store),
            source={
                name: Tensor(SPELLED[t.dtype], list(t.shape), read[name], t.file.path.name)
                for name, t in self.plan.source.items()
            },
            tensors={
                name: Tensor(SPELLED[array.dtype], list(array.tensor_shape), stored[name])
                for array in self.plan.arrays.values()
                for name in array.tensors
            },
            errors=_errors([done[u.key]["error"] for u in self.plan.units if u.scales is not None]),
        )


def _errors(sums: Iterable[Mapping[str, Any]]) -> dict[str, Error]:
    """The error report, by tensor kind. Sums are taken in the order of the units."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for unit in sums:
        kinds.setdefault(unit["kind"], []).append(unit)
    return {
        kind: Error(
            tensors=sum(u["tensors"] for u in units),
            relative_rms=math.sqrt(
                sum(u["error"] for u in units) / (sum(u["weight"] for u in units) or 1.0)
            ),
            largest=max(u["largest"] for u in units),
            largest_weight=max(u["largest_weight"] for u in units),
        )
        for kind, units in kinds.items()
    }
