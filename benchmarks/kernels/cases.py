"""The cases that the kernel benchmark times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from benchmarks.kernels.shapes import (
    Case,
    Decode,
    Dtype,
    Gradient,
    Grouped,
    Index,
    Prefill,
    PrefillGradient,
    SparseAttention,
    SparseCase,
    Swiglu,
    SwigluUnderGradient,
    TopK,
    key,
)


def zipf_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Distributes ``rows`` over ``groups`` in proportion to 1 / rank^0.8, with shuffled ranks."""
    share = 1 / np.arange(1, groups + 1) ** 0.8
    edges = np.round(np.cumsum(share) / share.sum() * rows).astype(int)
    sizes = np.diff(edges, prepend=0)
    return tuple(np.random.default_rng(0).permutation(sizes).tolist())


def few_sizes(groups: int) -> tuple[int, ...]:
    """Returns 1 to 4 random rows for each group."""
    return tuple(np.random.default_rng(1).integers(1, 5, groups).tolist())


def uniform_lengths(rows: int, longest: int) -> tuple[int, ...]:
    """Returns ``rows`` uniformly random lengths from 2 to ``longest``, which one of them is."""
    lengths = np.random.default_rng(2).integers(2, longest + 1, rows)
    lengths[rows // 2] = longest
    return tuple(lengths.tolist())


def ragged(
    name: str, lengths: Sequence[int], queries: int, heads: int, dtype: Dtype = "bf16"
) -> Decode:
    return Decode(
        len(lengths), max(lengths), queries, heads, dtype=dtype, ragged=tuple(lengths), name=name
    )


def decode_cases() -> list[Decode]:
    long = [(1, 4096), (16, 4096), (64, 4096), (128, 4096), (128, 8192), (32, 32768), (4, 131072)]
    cases = [Decode(b, s, t, 128) for t in (1, 2) for b, s in long]
    cases += [Decode(b, 4096, t, 64) for t in (1, 2) for b in (64, 128)]
    cases += [Decode(b, s, 1, 16) for b, s in [(64, 1024), (64, 4096), (256, 4096), (32, 32768)]]
    cases += [Decode(64, 4096, 2, 16)]
    for heads, rows, queries in [
        (128, 16, 1), (128, 64, 1), (128, 128, 1), (128, 64, 2), (64, 64, 1), (16, 64, 1),
        (16, 256, 1),
    ]:  # fmt: skip
        cases.append(ragged("2-8192", uniform_lengths(rows, 8192), queries, heads))
    one_long = [*[1024] * 31, 65536, *[1024] * 32]
    cases += [ragged("63x1024+65536", one_long, 1, heads) for heads in (128, 16)]
    cases.append(ragged("2-8192", uniform_lengths(128, 8192), 1, 128, "fp8"))
    # One sequence is no core case: its program contains the slowly compiling kernel 32 times.
    cases += [
        Decode(b, 4096, t, h, dtype="fp8", core=b > 1)
        for b, t, h in [(128, 1, 128), (128, 2, 128), (256, 1, 16), (1, 1, 128)]
    ]
    cases += [Decode(256, 4096, t, 16, dtype="fp8", core=False) for t in (2, 3, 5)]
    cases += [Decode(b, s, 1, 16, dtype="fp8", core=False) for b, s in [(64, 1024), (32, 32768)]]
    cases += [Decode(b, 1024, 1, 128, core=False) for b in (1, 64, 128, 256)]
    cases += [Decode(b, 1024, 1, 16, core=False) for b in (1, 128)]
    return cases


def grouped_cases() -> list[Grouped]:
    cases = []
    widths = [(4096, 7168), (7168, 2048)]  # the experts' two matmuls in DeepSeek-V3

    def add(name, sizes, dtype, layout):
        for N, K in widths:
            cases.append(Grouped(name, tuple(sizes), N, K, dtype, layout))

    few, many = few_sizes(256), zipf_sizes(8192, 256)
    dtypes: tuple[Dtype, ...] = ("fp8", "bf16")
    for dtype in dtypes:
        for g, m in [(8, 4096), (8, 1024), (32, 1024), (4, 8192), (32, 256)]:
            add(f"g{g} m{m}", [m] * g, dtype, "both" if m == 256 else "contiguous")
        for g, m in [(32, 16), (8, 16), (32, 64), (8, 64)]:
            add(f"g{g} m{m}", [m] * g, dtype, "masked")
        add("g256 zipf8192", many, dtype, "both")
        add("g256 m1-4", few, dtype, "masked")
    for dtype in ("int8", "int4"):
        for g, m in [(8, 16), (32, 16)]:
            add(f"g{g} m{m}", [m] * g, dtype, "masked")
        add("g256 m1-4", few, dtype, "masked")
    return cases + [
        Grouped(name, sizes, N, K, "bf16", "contiguous", False)
        for name, sizes, N, K in training_shapes()
    ]


def training_shapes() -> list[tuple[str, tuple[int, ...], int, int]]:
    """Returns name, rows per group, N and K of the experts' matmuls in training: those of Moonlight
    with 16,384 tokens, and of 32 experts of DeepSeek-V3. The groups are equal, or skewed."""
    shapes = []
    for model, rows, groups, widths in (
        ("moonlight", 98_304, 64, [(2816, 2048), (2048, 1408)]),
        ("v3", 32_768, 32, [(4096, 7168), (7168, 2048)]),
    ):
        for N, K in widths:
            shapes.append((f"{model} equal", (rows // groups,) * groups, N, K))
            shapes.append((f"{model} zipf", zipf_sizes(rows, groups), N, K))
    return shapes


def gradient_cases() -> list[Gradient]:
    of: tuple[Literal["rows", "matrices"], ...] = ("rows", "matrices")
    return [
        Gradient(name, sizes, N, K, "bf16", "contiguous", "equal" in name, of=each)
        for name, sizes, N, K in training_shapes()
        for each in of
    ]


def swiglu_cases() -> list[Swiglu]:
    """Returns cases with the gate and up matrices of DeepSeek-V3's experts."""
    dtypes: tuple[Dtype, ...] = ("fp8", "bf16")
    sizes: list[tuple[int, int, Literal["contiguous", "masked"]]] = [
        (8, 4096, "contiguous"), (32, 1024, "contiguous"), (32, 16, "masked"),
    ]  # fmt: skip
    return [
        Swiglu(f"g{g} m{m}", (m,) * g, 2048, 7168, dtype, layout)
        for dtype in dtypes
        for g, m, layout in sizes
    ]


def swiglu_under_gradient_cases() -> list[SwigluUnderGradient]:
    """Returns cases with the gate and up matrices of the experts in training."""
    return [
        SwigluUnderGradient(name, sizes, N // 2, K, "bf16", "contiguous", "equal" in name)
        for name, sizes, N, K in training_shapes()
        if (N, K) in ((2816, 2048), (4096, 7168))
    ]


def prefill_cases() -> list[Prefill]:
    shapes = [(1, 8192, 8192), (4, 4096, 4096), (8, 2048, 2048), (1, 2048, 8192)]
    return [Prefill(*shape) for shape in shapes]


def prefill_gradient_cases() -> list[PrefillGradient]:
    """Returns cases with the heads of Moonlight and of DeepSeek-V3."""
    shapes = [(4, 4096, 16), (1, 8192, 128), (1, 32768, 16), (4, 4096, 128)]
    return [PrefillGradient(rows, tokens, tokens, heads) for rows, tokens, heads in shapes]


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


def cases() -> list[Case]:
    """Returns all cases once: core cases first, ops interleaved for runs that end early."""
    order_of: dict[str, tuple[bool, float]] = {}
    unique: dict[str, Case] = {}
    dense = [prefill_cases(), decode_cases(), grouped_cases(), swiglu_cases()]
    training = [gradient_cases(), prefill_gradient_cases(), swiglu_under_gradient_cases()]
    for of_op in (*dense, *training, *sparse_cases()):
        for i, case in enumerate(of_op):
            order_of.setdefault(key(case), (not case.core, i / len(of_op)))
            unique.setdefault(key(case), case)
    return [unique[name] for name in sorted(order_of, key=order_of.__getitem__)]


def select(
    available: Iterable[Case], ops: Sequence[str], shapes: Sequence[str], *, everything: bool
) -> list[Case]:
    """Returns the cases of ``ops`` whose key contains one of ``shapes``, in the order of these.

    Without ``shapes``, returns the core cases, or all if ``everything``.
    """
    of_ops = [case for case in available if not ops or case.op in ops]
    if not shapes:
        return [case for case in of_ops if everything or case.core]
    unique = {key(case): case for s in shapes for case in of_ops if s in key(case)}
    return list(unique.values())
