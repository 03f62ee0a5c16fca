"""Kernels and settings that no call uses by default.

``python -m scripts.bench_kernels --variants NAME ...`` checks them and times them in turn with the
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.kernels.shapes import Case
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.grouped_swiglu import mosaic_gpu as grouped_swiglu
from pallas_kernels.mla_decode import mosaic_gpu as mla_decode
from pallas_kernels.mla_decode.scored_plan import ScoredQueries
from pallas_kernels.sparse_mla_decode import mosaic_gpu as sparse_mla_decode
from pallas_kernels.sparse_mla_decode.mosaic_gpu_kernel import Config as SparseConfig
from pallas_kernels.top_k import mosaic_gpu as top_k


@dataclasses.dataclass(frozen=True)
class Variant:
    """A setting of a back-end of one operation."""

    op: Callable[..., Any]
    """The back-end's function."""

    keywords: Mapping[str, Any]
    """Its arguments that make the difference."""

    dtypes: tuple[str, ...] = ("fp8",)
    """Cases for which it exists."""

    def __call__(self, **arguments: Any) -> Any:
        return self.op(**arguments, **self.keywords)


_UNROLLED_MATMUL = dataclasses.replace(grouped_matmul.MANY_TOKENS_FLOAT8[0], unrolled=True)
_UNROLLED_SWIGLU = dataclasses.replace(
    grouped_swiglu.MANY_TOKENS_FLOAT8[0], unrolled=True, approximate_silu=True
)

_APPROXIMATE_SWIGLU = dataclasses.replace(
    grouped_swiglu.MANY_TOKENS_FLOAT8[0], approximate_silu=True
)


def _decode(config: Any) -> Variant:
    return Variant(mla_decode.mla_decode, {"config": config})


VARIANTS: dict[str, dict[str, Variant]] = {
    "scored": {"mla_decode": _decode(ScoredQueries())},
    "scored, two pages ahead": {"mla_decode": _decode(ScoredQueries(prefetch=2))},
    "scored, without prefetch": {"mla_decode": _decode(ScoredQueries(prefetch=0))},
    "unrolled": {
        "grouped_matmul": Variant(grouped_matmul.grouped_matmul, {"config": _UNROLLED_MATMUL}),
        "grouped_swiglu": Variant(grouped_swiglu.grouped_swiglu, {"config": _UNROLLED_SWIGLU}),
    },
    "unrolled, panel of 8": {
        "grouped_matmul": Variant(
            grouped_matmul.grouped_matmul,
            {"config": dataclasses.replace(_UNROLLED_MATMUL, panel=8)},
        ),
        "grouped_swiglu": Variant(
            grouped_swiglu.grouped_swiglu,
            {"config": dataclasses.replace(_UNROLLED_SWIGLU, panel=8)},
        ),
    },
    "approximate SiLU": {
        "grouped_swiglu": Variant(grouped_swiglu.grouped_swiglu, {"config": _APPROXIMATE_SWIGLU}),
    },
    "without prefetch": {
        "sparse_mla_decode": Variant(
            sparse_mla_decode.sparse_mla_decode,
            {"config": SparseConfig(prefetch=False)},
            ("bf16", "fp8"),
        ),
    },
    "four warpgroups": {"top_k": Variant(top_k.top_k, {"warpgroups": 4}, ("fp32",))},
}
"""Variants by name and operation."""


def variant_of(case: Case, name: str) -> Variant:
    """Returns the function of a case's operation in a variant.

    Raises:
      NotImplementedError: the variant has none for the case.
    """
    ops = VARIANTS[name]
    if not has_variant(case, name):
        takes = ", ".join(f"{op} ({' or '.join(v.dtypes)})" for op, v in ops.items())
        raise NotImplementedError(f"{name} takes {takes}, got {case.op} {case.dtype}")
    return ops[case.op]


def has_variant(case: Case, name: str) -> bool:
    ops = VARIANTS[name]
    return case.op in ops and case.dtype in ops[case.op].dtypes
