"""The journal of an unfinished conversion: ``journal.jsonl`` in the store.

The first line records the source and the target. Each further line is one of:

* ``{"unit": ...}``: a unit of work is written and has been read back;
* ``{"undo": ...}``: such a unit was later found damaged or missing;
* ``{"stats": ...}``: the source's files were touched, and still have the same content.

A killed process leaves at most one torn line at the end, which is ignored.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from dsv3_jax.files import is_at, lock_file, naming

NAME = "journal.jsonl"

JournalLine = dict[str, Any]

_SUMS = ("tensors", "error", "weight", "largest", "largest_weight")


class ConversionJournal:
    """The journal, locked against other processes. Use it as a context manager. Raises ValueError
    if another process has the lock, or a complete line is not one that a conversion writes."""

    def __init__(self, directory: Path):
        self.path = directory / NAME
        busy = f"{directory}: another process is converting into it"
        self._file = self.path.open("a+b")
        try:
            lock_file(self._file, busy)
            if not is_at(self._file, self.path):  # its owner has just ended and removed it
                raise ValueError(busy)
            self._file.seek(0)
            self.lines, length = _parse(self._file.read())
            for number, line in enumerate(self.lines):
                if not _is_valid(line, first=number == 0):
                    raise self.damaged(line)
            self._file.truncate(length)
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()
        self.done: dict[str, JournalLine] = {}  # lines of the completed units, by the unit's key
        for line in self.lines:
            self._update_done(line)

    def __enter__(self) -> ConversionJournal:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a failed write was reported when it happened
            self._file.close()

    def add(self, line: JournalLine) -> None:
        """Appends a line. Safe to call from any thread."""
        text = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            with naming(self.path):
                self._file.write(text)
                self._file.flush()
            self.lines.append(line)
            self._update_done(line)

    def damaged(self, line: JournalLine) -> ValueError:
        """Returns the error for a line that no conversion writes."""
        return ValueError(
            f"{self.path}, line {self.lines.index(line) + 1}: expected what a conversion writes, "
            f"got {json.dumps(line)[:80]}; begin again with a new directory"
        )

    def _update_done(self, line: JournalLine) -> None:
        if "unit" in line:
            self.done[line["unit"]] = line
        self.done.pop(line.get("undo", ""), None)


def _parse(content: bytes) -> tuple[list[JournalLine], int]:
    """Parses up to the first torn line, and returns the lines and their length in bytes. Units
    recorded after a torn line are converted again."""
    lines, length = [], 0
    for line in content.splitlines(keepends=True):
        try:
            parsed = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            break
        if not isinstance(parsed, dict):
            break
        lines.append(parsed)
        length += len(line)
    return lines, length


def _is_valid(line: JournalLine, *, first: bool) -> bool:
    """Returns whether a line has the keys and types that a conversion writes."""
    if first:
        files, dicts = line.get("files"), (line.get("config"), line.get("stats"))
        return (
            isinstance(line.get("to"), str)
            and isinstance(files, dict)
            and all(isinstance(file, list) for file in files.values())
            and all(isinstance(each, dict) for each in dicts)
        )
    if "unit" in line:
        return (
            isinstance(line["unit"], str)
            and _are_hashes(line.get("source"))
            and _are_hashes(line.get("stored"))
            and ("error" not in line or _are_error_sums(line["error"]))
        )
    if "undo" in line:
        return isinstance(line["undo"], str)
    return isinstance(line.get("stats"), dict)


def _are_hashes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _are_error_sums(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    return all(map(_is_sum, map(value.get, _SUMS)))


def _is_sum(value: Any) -> bool:
    is_number = isinstance(value, float) or (isinstance(value, int) and value < 2**63)
    return is_number and value >= 0
