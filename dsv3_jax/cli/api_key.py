"""The API key that a command sends to a server."""

from __future__ import annotations

from pathlib import Path

from dsv3_jax.cli.flags import naming


def read_api_key(path: Path | None) -> str | None:
    """Returns the first key of ``--api-key-file``, as ``dsv3 serve`` reads it, or None.

    Raises:
      ValueError: the file has no key, or it cannot be read.
    """
    if path is None:
        return None
    with naming("--api-key-file"):
        text = path.read_text("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(
            f"--api-key-file: {path}: expected an API key on a line of its own, got none"
        )
    return keys[0]
