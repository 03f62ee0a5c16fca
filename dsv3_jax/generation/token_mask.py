"""Sets of token ids as bits, one for each token of the vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, UInt32


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMask:
    """The tokens that a request may generate.

    Attributes:
      words: bit ``i % 32`` of word ``i // 32`` is 1 if token i is allowed.
    """

    words: UInt32[np.ndarray, " n_words"]

    @classmethod
    def of(
        cls, vocab_size: int, allowed: Sequence[int] | None = None, banned: Sequence[int] = ()
    ) -> TokenMask:
        """Returns the mask of ``allowed``, or of all ids below ``vocab_size``, without
        ``banned``."""
        is_allowed = np.full(vocab_size, allowed is None)
        is_allowed[list(allowed or ())] = True
        is_allowed[list(banned)] = False
        return cls.pack(is_allowed)

    @classmethod
    def pack(cls, is_allowed: Bool[np.ndarray, " W"]) -> TokenMask:
        """Returns the mask with a bit for each entry."""
        padded = np.zeros(num_words(len(is_allowed)) * 32, bool)
        padded[: len(is_allowed)] = is_allowed
        return cls(np.packbits(padded, bitorder="little").view(np.dtype("<u4")).astype(np.uint32))

    def __and__(self, other: TokenMask) -> TokenMask:
        return TokenMask(self.words & other.words)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenMask) and np.array_equal(self.words, other.words)

    def __hash__(self) -> int:
        return hash(self.words.tobytes())

    def __bool__(self) -> bool:
        """Whether any token is allowed."""
        return bool(self.words.any())

    def __contains__(self, token: int) -> bool:
        return bool(self.words[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def without(self, tokens: Sequence[int]) -> TokenMask:
        """Returns the mask without some tokens."""
        words = self.words.copy()
        for token in tokens:
            words[token // 32] &= ~np.uint32(1 << token % 32)
        return TokenMask(words)


def num_words(vocab_size: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocab_size // 32)
