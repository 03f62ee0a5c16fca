"""Compiled programs kept between runs of the command."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax

DEFAULT = Path.home() / ".cache" / "dsv3_jax" / "xla"


def enable(directory: Path | None = None) -> Path | None:
    """Keeps compiled programs in a directory; to be called before anything is compiled.

    Args:
      directory: created if it does not exist. None keeps the cache that JAX is already configured
        with, else takes ``DEFAULT``. If that cannot be written, programs are not kept, and one line
        on stderr says so.

    Returns:
      The directory in use, or None if programs are not kept.

    Raises:
      ValueError: ``directory`` cannot be written.
    """
    given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if directory is not None:
        if fault := _fault(directory):
            raise ValueError(
                f"--compile-cache: expected a directory that can be written, got {directory}"
                f" ({fault})"
            )
        jax.config.update("jax_compilation_cache_dir", str(directory))
    elif not given:
        if fault := _fault(DEFAULT):
            print(
                f"dsv3: compiled programs are not kept: {DEFAULT} cannot be written ({fault})",
                file=sys.stderr,
                flush=True,
            )
            return None
        jax.config.update("jax_compilation_cache_dir", str(DEFAULT))
    # All of them: a start-up is made of many small programs beside the two large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory or Path(given or DEFAULT)


def _fault(directory: Path) -> str | None:
    """Why files cannot be written to a directory; None if they can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)
