"""Division of sparse attention's work among the programs of the Hopper kernel.

Every query has the same number of key blocks, so the division depends on shapes alone. All queries
are cut into pieces alike: a query's result does not depend on its place in the batch, to the last
bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

BLOCK = 64
"""Tokens per key block."""

PAIR = 2 * BLOCK
"""Tokens per pair of key blocks. The number of indices per query is padded to a multiple of it."""

# In units of the time that a pair of key blocks takes.
_PIECE_COST = 1  # prologue and epilogue
_MERGE_COST = 3  # the second kernel, and writing and reading partial results
_MIN_PAIRS = 2  # per piece: smaller partial results cost more to merge than they save


@dataclasses.dataclass(frozen=True)
class Work:
    """Pieces of queries, numbered consecutively. A program processes ``share`` of them."""

    queries: int
    """Number of queries of all sequences."""

    pairs: int
    """Pairs of key blocks per query."""

    pieces: int
    """Pieces per query. If there are several, each gives a partial result, and they are merged."""

    piece: int
    """Pairs per piece. The last piece of a query may have fewer."""

    share: int
    """Pieces per program. The last program may have fewer."""

    @property
    def total(self) -> int:
        """Number of pieces of all queries."""
        return self.queries * self.pieces

    @property
    def programs(self) -> int:
        """Number of programs for each tile of heads."""
        return -(-self.total // self.share)

    def query(self, number: Any) -> Any:
        """Returns the query of a piece."""
        return lax.div(number, jnp.int32(self.pieces))

    def first_pair(self, number: Any) -> Any:
        """Returns the first pair of a piece, counted over all queries."""
        q = self.query(number)
        return q * self.pairs + (number - q * self.pieces) * self.piece

    def is_first_block(self, block: Any) -> Any:
        """Returns whether a key block, counted over all queries, is the first of a piece."""
        of_query = lax.rem(block, jnp.int32(2 * self.pairs))
        return lax.rem(of_query, jnp.int32(2 * self.piece)) == 0

    def partial_results(self) -> npt.NDArray[np.int32]:
        """Returns the partial results of each query, as ``merge_partials`` takes them."""
        table = np.zeros((self.total, 4), np.int32)
        q = np.arange(self.queries)
        table[: self.queries, 0], table[: self.queries, 1] = q, q * self.pieces
        table[: self.queries, 2], table[:, 3] = self.pieces, self.queries
        return table


def divide(queries: int, indices: int, programs: int) -> Work:
    """Chooses the number of pieces with which ``programs`` concurrent programs finish first.

    Args:
      queries: number of queries of all sequences.
      indices: padded number of indices per query, a multiple of PAIR.
    """
    pairs = indices // PAIR

    def cut(piece: int) -> Work:
        pieces = -(-pairs // piece)
        return Work(queries, pairs, pieces, piece, -(-queries * pieces // programs))

    def cost(work: Work) -> int:
        merge = _MERGE_COST if work.pieces > 1 else 0
        return work.share * (work.piece + _PIECE_COST) + merge

    return min(map(cut, range(pairs, min(_MIN_PAIRS, pairs) - 1, -1)), key=cost)
