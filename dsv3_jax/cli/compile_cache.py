"""Compiled programs kept between runs of the command."""

from __future__ import annotations

from pathlib import Path

import jax

DEFAULT = Path.home() / ".cache" / "dsv3_jax" / "xla"


def enable(directory: Path | None = None) -> Path:
    """Keeps compiled programs in ``directory``; one that JAX was already given stays as it is."""
    if directory is None:
        given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        directory = Path(given or DEFAULT)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # All of them: a start-up is made of many small programs beside the two large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory
