"""Errors of an engine."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine failed or was shut down, so that a request cannot be served."""
