"""The shapes of sparse attention that the kernel benchmark times: indexer, selection, attention."""

from __future__ import annotations

import dataclasses
from typing import Literal

LATENT, ROPE, PAGE = 512, 64, 64
FLOAT8_TOKEN = 656  # bytes per token in a float8 cache
INDEX_HEADS, INDEX_COLUMNS, TOPK = 64, 128, 2048


@dataclasses.dataclass(frozen=True)
class SparseAttention:
    """A case of sparse_mla_decode or sparse_mla_prefill.

    Each of ``rows`` sequences has ``cached`` tokens and ``queries`` queries. A query reads ``topk``
    tokens, spread over all that it sees.
    """

    rows: int
    cached: int
    queries: int
    heads: int
    topk: int = TOPK
    core: bool = True
    op: Literal["sparse_mla_decode", "sparse_mla_prefill"] = "sparse_mla_decode"
    dtype: Literal["bf16", "fp8"] = "bf16"
    """Format of the cache."""

    @property
    def shape(self) -> str:
        return f"h{self.heads} b{self.rows} kv{self.cached} sq{self.queries} top{self.topk}"

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.queries * self.heads * (2 * LATENT + ROPE) * self.topk

    @property
    def bytes(self) -> float:
        """Bytes of all operands; queries of a sequence may share tokens, but not indices."""
        per_query = self.heads * (2 * (2 * LATENT + ROPE) + 4) + 4 * self.topk
        tokens = min(self.cached, self.queries * self.topk)
        per_token = FLOAT8_TOKEN if self.dtype == "fp8" else 2 * (LATENT + ROPE)
        return self.rows * (tokens * per_token + self.queries * per_query)


@dataclasses.dataclass(frozen=True)
class Index:
    """A case of sparse_index: the last ``queries`` of ``cached`` tokens score all before them."""

    rows: int
    cached: int
    queries: int
    core: bool = True
    op: str = "sparse_index"
    dtype: Literal["fp8"] = "fp8"

    @property
    def shape(self) -> str:
        return f"b{self.rows} kv{self.cached} sq{self.queries}"

    @property
    def flops(self) -> float:
        T, start = self.queries, self.cached - self.queries
        visible = T * start + T * (T + 1) // 2
        return 2.0 * self.rows * INDEX_HEADS * INDEX_COLUMNS * visible

    @property
    def bytes(self) -> float:
        per_query = INDEX_HEADS * (INDEX_COLUMNS + 4) + 4 * self.cached
        return self.rows * (self.cached * (INDEX_COLUMNS + 4) + self.queries * per_query)


@dataclasses.dataclass(frozen=True)
class TopK:
    """A case of top_k: ``k`` of ``columns`` random scores in each of ``rows`` rows."""

    rows: int
    columns: int
    k: int = TOPK
    core: bool = True
    op: str = "top_k"
    dtype: Literal["fp32"] = "fp32"

    @property
    def shape(self) -> str:
        return f"b{self.rows} of {self.columns} k{self.k}"

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def bytes(self) -> float:
        return 4.0 * self.rows * (self.columns + self.k)


SparseCase = SparseAttention | Index | TopK


def sparse_cases() -> list[list[SparseCase]]:
    """Returns the cases of each operation."""
    decode: list[SparseCase] = [
        SparseAttention(rows, 32768, queries, heads)
        for rows, queries, heads in [
            (1, 1, 128), (16, 1, 128), (64, 1, 128), (128, 1, 128), (128, 2, 128), (64, 1, 64),
            (64, 1, 16), (64, 5, 16),
        ]
    ]  # fmt: skip
    decode += [
        SparseAttention(rows, 32768, queries, heads, dtype="fp8")
        for rows, queries, heads in [(1, 1, 128), (64, 1, 128), (128, 2, 128), (64, 1, 16)]
    ]
    prefill: list[SparseCase] = [
        SparseAttention(1, cached, 4096, heads, op="sparse_mla_prefill")
        for cached, heads in [(8192, 128), (32768, 128), (32768, 64)]
    ]
    indexer = [
        (1, 131072, 1), (64, 4096, 1), (64, 32768, 1), (64, 32768, 2), (8, 131072, 1),
        (1, 8192, 4096), (1, 32768, 2048),
    ]  # fmt: skip
    index: list[SparseCase] = [Index(b, s, t) for b, s, t in indexer]
    rows = [(1, 32768), (64, 4096), (64, 32768), (64, 131072), (1, 131072), (1024, 32768)]
    return [decode, prefill, index, [TopK(b, s) for b, s in rows]]
