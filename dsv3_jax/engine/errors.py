"""Errors of an engine."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine failed or was shut down, so that a request cannot be served."""


class RequestError(RuntimeError):
    """A single request failed: its grammar raised or allowed no token, or its tokens could not be
    decoded. ``__cause__`` is the original error. Other requests go on."""


def step_failed(error: BaseException) -> EngineError:
    """Returns the error of all requests after a step has failed."""
    failed = EngineError(f"engine: a step failed: {str(error) or type(error).__name__}")
    failed.__cause__ = error
    return failed


def copy_of(failure: EngineError) -> EngineError:
    """Returns an equal error. Raising an error changes it."""
    error = EngineError(str(failure))
    error.__cause__ = failure.__cause__
    return error
