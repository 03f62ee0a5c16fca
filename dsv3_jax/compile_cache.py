"""JAX's persistent compilation cache, which keeps compiled programs between processes.

Commands and Python programs use the same one: :func:`dsv3_jax.load`, ``Generator``, ``Engine`` and
``Trainer`` call :func:`enable`. Whatever JAX itself is configured with takes precedence:
``JAX_COMPILATION_CACHE_DIR`` or ``jax_compilation_cache_dir`` names another directory, and
``JAX_ENABLE_COMPILATION_CACHE=false`` or ``jax_enable_compilation_cache`` turns the cache off.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from dsv3_jax.files import write_failure

logger = logging.getLogger(__name__)

_ENABLED = "jax_enable_compilation_cache"
_DIRECTORY = "jax_compilation_cache_dir"

# Programs of any size and compile time: a start compiles many small ones besides the large ones.
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

_SLOW_SECONDS = 2.0  # compilations that take longer are reported
_XLA_NOTE_SECONDS = 100.0  # after 120, XLA asks for a bug report
_REPORT_SECONDS = 15.0  # time between two reports of the same compilation


def enable(directory: Path | None = None) -> Path | None:
    """Enables the cache, unless JAX is configured with one already. Later calls change nothing.

    Args:
      directory: what a command's ``--compile-cache`` names. It is created if it does not exist.
        None uses the directory that JAX is configured with, or else :func:`default_directory`. If
        that one cannot be written, the cache stays off, and a warning reports it.

    Returns:
      The directory in use, or None if the cache is off.

    Raises:
      ValueError: ``directory`` is not writable.
    """
    if directory is not None:
        if reason := write_failure(directory):
            raise ValueError(
                f"--compile-cache: expected a directory that can be written, got {directory}"
                f" ({reason})"
            )
    elif (used := current()) is not None or not jax.config.values[_ENABLED]:
        return used
    elif (directory := _usable(default_directory())) is None:
        return None
    jax.config.update(_DIRECTORY, str(directory))
    for name, value in _THRESHOLDS.items():
        jax.config.update(name, value)
    return current()


def current() -> Path | None:
    """Returns the directory in which JAX keeps compiled programs, or None if it keeps none."""
    directory = jax.config.values[_DIRECTORY]
    return Path(directory) if directory and jax.config.values[_ENABLED] else None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Disables JAX's cache during the body, for programs that must come from the compiler."""
    before = jax.config.values[_ENABLED]
    try:
        jax.config.update(_ENABLED, False)
        compilation_cache.reset_cache()  # JAX reads the setting once
        yield
    finally:
        jax.config.update(_ENABLED, before)
        compilation_cache.reset_cache()


def default_directory() -> Path | None:
    """Returns the directory for programs in the user's home, or None if the user has no home."""
    try:
        home = Path.home()
    except RuntimeError:  # for example an arbitrary user id in a container
        return None
    return home / ".cache" / "dsv3_jax" / "xla"


class CompileProgress:
    """Context manager that logs a compilation of ``total`` programs as long as it lasts, if it
    takes long. The first line is a warning, because otherwise a program would be silent for
    minutes. Those after it are information."""

    def __init__(self, total: int):
        self._total, self._done = total, 0
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="dsv3-compiling", daemon=True)

    def __enter__(self) -> CompileProgress:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def advance(self, *_: object) -> None:
        """Counts a program that is compiled. Can be called from any thread."""
        with self._counting:
            self._done += 1

    def _report(self) -> None:
        if self._ended.wait(_SLOW_SECONDS):
            return
        programs = "a program" if self._total == 1 else f"{self._total} programs"
        directory = current()
        logger.warning(
            "compiling %s: %s",
            programs,
            "they are not kept, because the compile cache is off"
            if directory is None
            else f"later starts load what is kept in {directory}",
        )
        while not self._ended.wait(_REPORT_SECONDS):
            seconds = time.monotonic() - self._began
            note = "" if seconds < _XLA_NOTE_SECONDS else "; XLA's 'Very slow compile?' is no error"
            logger.info(
                "compiled %d of %d programs in %.0f s%s", self._done, self._total, seconds, note
            )


@functools.cache
def _usable(directory: Path | None) -> Path | None:
    """Returns the directory if it can be written. Otherwise warns, once, and returns None."""
    if directory is None:
        reason = "the user has no home directory"
    elif not (reason := write_failure(directory)):
        return directory
    logger.warning("compiled programs are not kept: %s cannot be written (%s)", directory, reason)
    return None
