"""Errors of an engine."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine failed or was shut down, so that a request cannot be served."""


class RequestError(RuntimeError):
    """A single request failed: its grammar raised or allowed no token, or its tokens could not be
    decoded. ``__cause__`` is the original error. Other requests go on."""
