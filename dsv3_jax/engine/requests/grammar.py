"""Grammars: which tokens of one request may come next, decided on the host.

An engine does not know what a grammar is. It asks an object of the caller's for the tokens that may
come next, and tells it the token that was selected. The mask has the layout of llguidance and
xgrammar: one bit for each token.

With drafts, the device selects several tokens in a step, and the mask is for the first of them
alone. The host asks the grammar for each of the others. It refuses the first one that may not come,
and all after it; the next step removes them on the device and selects a token with the mask. That
keeps the distribution: with p the probability of a token and A that of all allowed ones, an allowed
token is selected with probability ``p`` at once and ``(1 - A) * p / A`` after a refusal, which
makes ``p / A``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.request import Request, TokenMask


@runtime_checkable
class Grammar(Protocol):
    """Decides which tokens of one request may come next. The engine calls it in one thread at a
    time, and the grammars of different requests in several. A grammar that raises, or allows no
    token, ends its request with a :class:`dsv3_jax.engine.RequestError`, and no other."""

    def mask(self) -> np.ndarray:
        """Returns the tokens that may come next, as ``ceil(W / 32)`` integers of 32 bits for a
        vocabulary of W tokens. Bit ``i % 32`` of integer ``i // 32`` stands for token i.
        End-of-sequence and stop tokens are among them only where the text may end."""
        ...

    def accept(self, token: int) -> None:
        """Takes the token that came next. It is not called for the token that ends the request."""
        ...


class GrammarTracker:
    """Follows a request with its grammar. Any request may generate ``selectable`` tokens alone."""

    def __init__(self, grammar: Grammar, request: Request, selectable: TokenMask):
        self._grammar = grammar
        self._request = request
        self._tokens = 0
        self._constrained: Request | None = None
        self._allowed = selectable
        if request.allowed is not None:
            self._allowed &= request.allowed

    def accept(self, tokens: Sequence[int], *, ends: bool) -> int:
        """Takes the tokens of a step, up to the first one that may not come. Returns their number.
        ``ends``: the request ends with the last one."""
        for i, token in enumerate(tokens):
            # The device applied the mask to the first one.
            if i and token not in (self.constrained().allowed or ()):
                return i
            if not (ends and i == len(tokens) - 1):
                self._grammar.accept(token)
                self._tokens += 1
                self._constrained = None
        return len(tokens)

    def constrained(self) -> Request:
        """Returns the request with the tokens that may come next."""
        if self._constrained is not None:
            return self._constrained
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
        self._constrained = dataclasses.replace(self._request, allowed=allowed)
        return self._constrained


def allows_drafts(request: Request, drafter: Drafter) -> bool:
    """Returns whether a request with a grammar keeps its distribution with drafts.

    Filters choose among the tokens that are allowed, and tokens after the first one of a step are
    filtered without the mask. Synthetic drafts would be accepted even if they are not allowed.
    """
    is_filtered = request.top_k or request.top_p < 1.0 or request.min_p
    return drafter.acceptance is None and not (request.temperature and is_filtered)
