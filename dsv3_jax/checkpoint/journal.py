"""What an unfinished conversion has done so far: ``journal.jsonl`` in the store.

The first line says what is converted from what. Then a line each: ``{"unit": ...}`` for a unit of
work whose blocks are written and read back, ``{"undo": ...}`` for one that was found spoiled later.
A process that dies leaves at most one torn line, which does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

from dsv3_jax.checkpoint.failures import naming

NAME = "journal.jsonl"


class Journal:
    """The lines of the file, and the only process that may add to them. A context.

    Raises:
      ValueError: another process is at work on the store.
    """

    def __init__(self, directory: Path):
        self.path = directory / NAME
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"{directory}: another process is converting into it") from None
        self._lock = threading.Lock()
        self._file.seek(0)
        self.lines, good = _parsed(self._file.read())
        self._file.truncate(good)
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
        except ValueError:
            break
        if not isinstance(parsed, dict):
            break
        lines.append(parsed)
        good += len(line)
    return lines, good
