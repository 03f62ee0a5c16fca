"""The shapes that the kernel benchmark times, with their FLOPs and bytes.

FLOPs exclude padding. Bytes count every operand once: what a kernel has to read and write, not what
it actually transfers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

LATENT, ROPE, PAGE = 512, 64, 64
FLOAT8_TOKEN = 656  # bytes per token in a float8 cache
INDEX_HEADS, INDEX_COLUMNS, TOPK = 64, 128, 2048

Dtype = Literal["bf16", "fp8", "int8", "int4"]
OPS = (
    "mla_decode", "grouped_matmul", "grouped_swiglu", "mla_prefill", "sparse_mla_decode",
    "sparse_mla_prefill", "sparse_index", "top_k", "grouped_matmul_gradient",
    "mla_prefill_gradient", "grouped_swiglu_under_gradient",
)  # fmt: skip

BYTES: dict[str, float] = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
BLOCK = 128  # block size of float8 scales, and columns per int4 scale
WORKING_SET = 320e6  # bytes of rotated inputs: six times an H200's L2 cache
WINDOWS, WINDOW_S = 5, 0.02  # per turn; a kernel has several turns
WARM_S = 0.3  # warm-up before a turn's windows, because clocks drop under load
CALLS = 32  # maximum per program: XLA compiles the kernel again for each call


@dataclasses.dataclass(frozen=True)
class Decode:
    """A case of mla_decode: ``rows`` sequences with ``queries`` query tokens of ``heads`` heads.

    Every sequence has ``cached`` tokens. In a ragged case sequence b has ``ragged[b]``, ``cached``
    is the largest of them, and ``name`` describes them. ``dtype`` is that of the cache.
    """

    rows: int
    cached: int
    queries: int
    heads: int
    core: bool = True
    op: str = "mla_decode"
    dtype: Dtype = "bf16"
    ragged: tuple[int, ...] = ()
    name: str = ""

    @property
    def shape(self) -> str:
        return f"h{self.heads} b{self.rows} kv{self.name or self.cached} sq{self.queries}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.ragged or (self.cached,) * self.rows

    @property
    def flops(self) -> float:
        visible = sum(length - t for length in self.lengths for t in range(self.queries))
        return 2.0 * self.heads * (2 * LATENT + ROPE) * visible

    @property
    def bytes(self) -> float:
        per_query = 2 * (2 * LATENT + ROPE) + 4  # query, output, and float32 LSE
        tokens = self.rows * self.queries * self.heads
        per_cached = FLOAT8_TOKEN if self.dtype == "fp8" else 2 * (LATENT + ROPE)
        return sum(self.lengths) * per_cached + tokens * per_query


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A case of grouped_matmul with ``sizes[g]`` rows in group g.

    ``layout`` selects the DeepGEMM peers: contiguous groups, masked groups or both.
    """

    name: str
    sizes: tuple[int, ...]
    N: int
    K: int
    dtype: Dtype
    layout: Literal["contiguous", "masked", "both"]
    core: bool = True
    op: str = "grouped_matmul"

    @property
    def shape(self) -> str:
        return f"{self.name} {self.N}x{self.K}"

    @property
    def M(self) -> int:  # noqa: N802, the usual letter
        return sum(self.sizes)

    @property
    def columns(self) -> int:
        """Number of output columns of all matrices of a group."""
        return self.N

    @property
    def lhs_dtype(self) -> Dtype:
        return "fp8" if self.dtype == "fp8" else "bf16"

    @property
    def flops(self) -> float:
        return 2.0 * self.M * self.columns * self.K

    @property
    def bytes(self) -> float:
        used = sum(size > 0 for size in self.sizes)
        blocks = -(-self.K // BLOCK)
        scales = {
            "bf16": 0,
            "fp8": 4 * (self.M * blocks + used * -(-self.columns // BLOCK) * blocks),
            "int8": 4 * used * self.N,
            "int4": 4 * used * self.N * blocks,
        }[self.dtype]
        lhs = self.M * self.K * BYTES[self.lhs_dtype]
        matrices = used * self.columns * self.K * BYTES[self.dtype]
        return lhs + matrices + scales + self.M * self.N * 2


@dataclasses.dataclass(frozen=True)
class Gradient(Grouped):
    """A gradient of a bfloat16 grouped_matmul, with respect to its rows or to its matrices."""

    of: Literal["rows", "matrices"] = "rows"
    op: str = "grouped_matmul_gradient"

    @property
    def shape(self) -> str:
        return f"{self.of} {super().shape}"

    @property
    def bytes(self) -> float:
        matrices = len(self.sizes) * self.N * self.K
        if self.of == "rows":
            matrices = sum(size > 0 for size in self.sizes) * self.N * self.K
        return 2.0 * (self.M * (self.N + self.K) + matrices)


@dataclasses.dataclass(frozen=True)
class Swiglu(Grouped):
    """A case of grouped_swiglu: gate and up matrices with ``N`` columns each."""

    op: str = "grouped_swiglu"

    @property
    def columns(self) -> int:
        return 2 * self.N

    @property
    def product(self) -> Grouped:
        """The matmul with both matrices as one, without the SwiGLU epilogue."""
        return Grouped(self.name, self.sizes, self.columns, self.K, self.dtype, self.layout)


@dataclasses.dataclass(frozen=True)
class SwigluUnderGradient(Swiglu):
    """The forward pass of grouped_swiglu's gradient, which stores the results of both matmuls too.
    ``bytes`` does not count them."""

    op: str = "grouped_swiglu_under_gradient"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A case of mla_prefill: causal attention of the last ``queries`` of ``keys`` tokens."""

    rows: int
    queries: int
    keys: int
    heads: int = 128
    K: int = 192
    V: int = 128
    core: bool = True
    op: str = "mla_prefill"
    dtype: Dtype = "bf16"

    @property
    def shape(self) -> str:
        over = "" if self.queries == self.keys else f" over {self.keys}"
        return f"h{self.heads} {self.rows}x{self.queries}{over}"

    @property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, of a sequence and head."""
        T, start = self.queries, self.keys - self.queries
        return T * start + T * (T + 1) // 2

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.heads * (self.K + self.V) * self.visible

    @property
    def bytes(self) -> float:
        query_bytes = self.queries * (2 * (self.K + self.V) + 4)
        return self.rows * self.heads * (query_bytes + self.keys * 2 * (self.K + self.V))


@dataclasses.dataclass(frozen=True)
class PrefillGradient(Prefill):
    """The gradient of a case of mla_prefill, given its result. FLOPs are those of five matmuls;
    a kernel may need more."""

    op: str = "mla_prefill_gradient"

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.heads * (3 * self.K + 2 * self.V) * self.visible

    @property
    def bytes(self) -> float:
        query_bytes = self.queries * (2 * (2 * self.K + 2 * self.V) + 4)
        key_bytes = self.keys * 4 * (self.K + self.V)
        return self.rows * self.heads * (query_bytes + key_bytes)


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

Case = Decode | Grouped | Prefill | SparseCase


def key(case: Case) -> str:
    return f"{case.op} {case.dtype} {case.shape}"


def encoded(case: Case) -> dict[str, Any]:
    """Encodes a case for a request to another process; see :func:`decoded`."""
    return dataclasses.asdict(case)


def decoded(fields: dict[str, Any]) -> Case:
    kinds: dict[str, type[Case]] = {
        "mla_decode": Decode,
        "grouped_matmul": Grouped,
        "grouped_matmul_gradient": Gradient,
        "grouped_swiglu": Swiglu,
        "grouped_swiglu_under_gradient": SwigluUnderGradient,
        "mla_prefill": Prefill,
        "mla_prefill_gradient": PrefillGradient,
        "sparse_mla_decode": SparseAttention,
        "sparse_mla_prefill": SparseAttention,
        "sparse_index": Index,
        "top_k": TopK,
    }
    for name in {"sizes", "ragged"} & set(fields):
        fields = fields | {name: tuple(fields[name])}
    return kinds[fields["op"]](**fields)


def rotation(case: Case, us: float, most: int = CALLS) -> tuple[int, int]:
    """Returns (number of input sets, laps over them) of a program, for calls of about ``us``.

    The sets exceed the L2 cache, the program takes about a millisecond, which is long compared with
    its launch, and it makes at most ``most`` calls.
    """
    sets = int(min(most, max(2, -(-WORKING_SET // case.bytes))))
    laps = int(min(most // sets, max(1, -(-1000 // (sets * us)))))
    return sets, laps


def float8_arithmetic(case: Case) -> bool:
    """Returns whether a case multiplies in float8. Other 8-bit and 4-bit cases use bfloat16."""
    return case.dtype == "fp8" and isinstance(case, Grouped | Index)


def guessed_us(case: Case) -> float:
    """Estimates a good kernel's time on an H200. It determines only the length of programs."""
    peak = 1200e12 if float8_arithmetic(case) else 650e12
    return 1e6 * max(case.flops / peak, case.bytes / 4.2e12) * 1.2 + 5


def page_tables(case: Decode, seed: int) -> np.ndarray:
    """Returns block tables with pages in random order, each used once, padded with 0."""
    page_counts = [-(-length // PAGE) for length in case.lengths]
    order = np.random.default_rng(seed).permutation(sum(page_counts))
    tables = np.zeros((case.rows, max(page_counts)), np.int32)
    for row, pages in zip(tables, np.split(order, np.cumsum(page_counts)[:-1]), strict=True):
        row[: len(pages)] = pages
    return tables
