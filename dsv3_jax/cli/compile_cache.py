"""JAX's persistent compilation cache, which keeps compiled programs between runs of the command."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax

DEFAULT = Path.home() / ".cache" / "dsv3_jax" / "xla"


def enable(directory: Path | None = None) -> Path | None:
    """Enables the cache. Must be called before anything is compiled.

    Args:
      directory: created if it does not exist. None uses the directory that JAX is already
        configured with, or else ``DEFAULT``. If ``DEFAULT`` is not writable, the cache stays off
        and a line on stderr reports it.

    Returns:
      The directory in use, or None if the cache is off.

    Raises:
      ValueError: ``directory`` is not writable.
    """
    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if directory is not None:
        if reason := _write_failure(directory):
            raise ValueError(
                f"--compile-cache: expected a directory that can be written, got {directory}"
                f" ({reason})"
            )
        jax.config.update("jax_compilation_cache_dir", str(directory))
    elif not configured:
        if reason := _write_failure(DEFAULT):
            print(
                f"dsv3: compiled programs are not kept: {DEFAULT} cannot be written ({reason})",
                file=sys.stderr,
                flush=True,
            )
            return None
        jax.config.update("jax_compilation_cache_dir", str(DEFAULT))
    # Programs of any size and compile time: a start compiles many small ones besides the two large.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory or Path(configured or DEFAULT)


def _write_failure(directory: Path) -> str | None:
    """Returns why no file can be written to a directory, or None if it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)
