"""What an unfinished conversion has done so far: ``journal.jsonl`` in the store.

The first line says what is converted from what. Then a line each: ``{"unit": ...}`` for a unit of
work whose blocks are written and read back, ``{"undo": ...}`` for one that was found spoiled later.
A process that dies leaves at most one torn line, which does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from dsv3_jax.files import is_at, lock_file, naming

NAME = "journal.jsonl"

_SUMS = ("tensors", "error", "weight", "largest", "largest_weight")


class Journal:
    """The lines of the file, and the only process that may add to them. A context.

    Raises:
      ValueError: another process is at work on the store, or a line is whole and yet none that a
        conversion writes.
    """

    def __init__(self, directory: Path):
        self.path = directory / NAME
        busy = f"{directory}: another process is converting into it"
        self._file = self.path.open("a+b")
        try:
            lock_file(self._file, busy)
            if not is_at(self._file, self.path):  # its process has just ended and removed it
                raise ValueError(busy)
            self._file.seek(0)
            self.lines, good = _parsed(self._file.read())
            for number, line in enumerate(self.lines):
                if not _is_written_by_us(line, first=number == 0):
                    raise self.damaged(line)
            self._file.truncate(good)
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()
        self.done: dict[str, Any] = {}
        """Lines of the units that are done, by name."""
        for line in self.lines:
            self._note(line)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said at the time
            self._file.close()

    def add(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            with naming(self.path):
                self._file.write(text)
                self._file.flush()
            self.lines.append(line)
            self._note(line)

    def damaged(self, line: dict[str, Any]) -> ValueError:
        """The error for one of the lines."""
        return ValueError(
            f"{self.path}, line {self.lines.index(line) + 1}: expected what a conversion writes, "
            f"got {json.dumps(line)[:80]}; begin again with a new directory"
        )

    def _note(self, line: dict[str, Any]) -> None:
        if "unit" in line:
            self.done[line["unit"]] = line
        self.done.pop(line.get("undo", ""), None)

    def remove(self) -> None:
        os.unlink(self.path)


def _parsed(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Lines up to the first that is torn, and their length: what they say follows is done again."""
    lines, good = [], 0
    for line in content.splitlines(keepends=True):
        try:
            parsed = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            break
        if not isinstance(parsed, dict):
            break
        lines.append(parsed)
        good += len(line)
    return lines, good


def _is_written_by_us(line: dict[str, Any], *, first: bool) -> bool:
    """Whether a line has the keys and types of one that a conversion writes."""
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
            and _is_hashes(line.get("source"))
            and _is_hashes(line.get("stored"))
            and ("error" not in line or _is_error(line["error"]))
        )
    if "undo" in line:
        return isinstance(line["undo"], str)
    return isinstance(line.get("stats"), dict)


def _is_hashes(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_error(sums: Any) -> bool:
    if not isinstance(sums, dict) or not isinstance(sums.get("kind"), str):
        return False
    return all(map(_is_sum, map(sums.get, _SUMS)))


def _is_sum(value: Any) -> bool:
    right = isinstance(value, float) or (isinstance(value, int) and value < 2**63)
    return right and value >= 0
