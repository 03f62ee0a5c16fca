"""Grammars: which tokens of one request may come next, decided on the host.

An engine does not know what a grammar is. It asks an object of the caller's for the tokens that may
come next, and tells it the token that was selected. The mask has the layout of llguidance and
xgrammar: one bit for each token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from dsv3_jax.generation.request import Request
from dsv3_jax.generation.token_mask import TokenMask


@runtime_checkable
class Grammar(Protocol):
    """Decides which tokens of one request may come next. The engine calls it in the thread that
    runs its steps. A grammar that raises, or allows no token, ends its request with a
    :class:`dsv3_jax.engine.RequestError`, and no other."""

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, as ``ceil(W / 32)`` integers of 32 bits for a
        vocabulary of W tokens. Bit ``i % 32`` of integer ``i // 32`` stands for token i.
        End-of-sequence and stop tokens are among them only where the text may end."""
        ...

    def accept(self, token: int) -> None:
        """Takes the token that came next. It is not called for the token that ends the request."""
        ...


class GrammarTracker:
    """Follows a request with its grammar.

    Args:
      selectable: the tokens that any request may generate.
    """

    def __init__(self, grammar: Grammar, request: Request, selectable: TokenMask):
        self._grammar = grammar
        self._request = request
        self._tokens = 0
        self._allowed = selectable
        if request.allowed is not None:
            self._allowed &= request.allowed

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the request's next tokens."""
        for token in tokens:
            self._grammar.accept(token)
            self._tokens += 1

    def constrained(self) -> Request:
        """Returns the request with the tokens that may come next.

        Raises:
          ValueError: there are none, or the mask has another size.
        """
        words = np.asarray(self._grammar.mask())
        expected = self._allowed.words.shape
        if words.shape != expected or words.dtype.kind not in "iu" or words.dtype.itemsize != 4:
            raise ValueError(
                f"mask: expected {expected[0]} integers of 32 bits, got {words.dtype} {words.shape}"
            )
        allowed = TokenMask(words.view(np.uint32)) & self._allowed
        is_early = self._tokens < self._request.min_tokens
        if not (allowed.without(self._request.stop_tokens) if is_early else allowed):
            raise ValueError(
                f"mask: expected a token that may come after {self._tokens} new ones, got none"
            )
        return dataclasses.replace(self._request, allowed=allowed)


def check_grammars(grammars: Sequence[object]) -> None:
    """Raises ValueError unless each is a :class:`Grammar`, and none serves two requests."""
    for grammar in grammars:
        if not isinstance(grammar, Grammar):
            raise ValueError(
                "grammar: expected an object with mask() and accept(token), got "
                f"{type(grammar).__name__}"
            )
    if len(set(map(id, grammars))) < len(grammars):
        raise ValueError("grammar: expected another object for each completion, got one twice")
