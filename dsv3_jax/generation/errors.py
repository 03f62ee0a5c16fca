"""Exceptions that end generation early, and errors of an engine and of its requests."""

from __future__ import annotations

from dsv3_jax.generation.completion import Generation


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during :meth:`Generator.generate`.

    Attributes:
      generation: a completion for every prompt. Unfinished completions have the finish_reason
        ``"interrupted"``; those of prompts that were not started have no tokens.
    """

    def __init__(self, generation: Generation):
        super().__init__("generation interrupted")
        self.generation = generation


class NonFiniteLogitsError(ValueError):
    """The model computed NaN or an infinity for the logits of the next token.

    Attributes:
      generation: a completion for every prompt, with the tokens before such logits. The affected
        sequences have the finish_reason ``"error"``; other unfinished ones ``"interrupted"``.
    """

    def __init__(self, message: str, generation: Generation):
        super().__init__(message)
        self.generation = generation


class EngineError(RuntimeError):
    """The engine failed or was shut down, so that a request cannot be served."""


class RequestError(RuntimeError):
    """A single request failed: its grammar raised or allowed no token, or its tokens could not be
    decoded. ``__cause__`` is the original error. Other requests go on."""
