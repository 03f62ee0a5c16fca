"""The API key that a command sends to a server."""

from __future__ import annotations

from pathlib import Path


def read_api_key(path: Path | None) -> str | None:
    """Returns the first key of a file, as ``dsv3 serve --api-key-file`` reads it, or None.

    Raises:
      ValueError: the file has no key.
      OSError: it cannot be read.
    """
    if path is None:
        return None
    lines = [line.strip() for line in path.read_text("utf-8", errors="replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path}: expected an API key on a line of its own, got none")
    return keys[0]
