"""Kernels and settings that no call uses by default.

``python -m scripts.bench_kernels --variants NAME ...`` checks them and times them in turn with the
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.kernels.shapes import Case
from pallas_kernels.grouped_matmul import few_tokens
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.grouped_swiglu import mosaic_gpu as grouped_swiglu
from pallas_kernels.mla_decode import mosaic_gpu as mla_decode
from pallas_kernels.mla_decode.few_queries_plan import FewQueries
from pallas_kernels.mla_decode.scored_plan import ScoredQueries


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


def _decode(config: Any) -> Variant:
    return Variant(mla_decode.mla_decode, {"config": config})


def _few_tokens(dtype: str, **settings: Any) -> dict[str, Variant]:
    """Returns few tokens by integer matrices with other settings than the default's."""

    def matmul(lhs: Any, rhs: Any, *args: Any, block_shape: Any, **arrays: Any) -> Any:
        weights = few_tokens.weights_of(rhs, lhs.shape[1], block_shape)
        config = few_tokens.default_config(len(lhs), len(rhs), weights)
        config = dataclasses.replace(config, **settings)
        return grouped_matmul.grouped_matmul(
            lhs, rhs, *args, **arrays, block_shape=block_shape, config=config
        )

    return {"grouped_matmul": Variant(matmul, {}, (dtype,))}


def _float8(**settings: Any) -> dict[str, Variant]:
    """Returns the kernels of many float8 tokens with other settings than the default's."""
    matmul = dataclasses.replace(grouped_matmul.UNROLLED_FLOAT8, **settings)
    swiglu = dataclasses.replace(grouped_swiglu.UNROLLED_FLOAT8, **settings)
    return {
        "grouped_matmul": Variant(grouped_matmul.grouped_matmul, {"config": matmul}),
        "grouped_swiglu": Variant(grouped_swiglu.grouped_swiglu, {"config": swiglu}),
    }


def _bfloat16(**settings: Any) -> dict[str, Variant]:
    """Returns the kernels of many bfloat16 tokens with other settings than the default's."""
    ops = {"grouped_matmul": grouped_matmul, "grouped_swiglu": grouped_swiglu}
    return {
        name: Variant(
            getattr(op, name),
            {"config": dataclasses.replace(op.MANY_TOKENS_BFLOAT16[0], **settings)},
            ("bf16",),
        )
        for name, op in ops.items()
    }


VARIANTS: dict[str, dict[str, Variant]] = {
    "scored": {"mla_decode": _decode(ScoredQueries())},
    "few queries": {"mla_decode": _decode(FewQueries())},
    "scored, one operand ahead": {"mla_decode": _decode(ScoredQueries(ahead=1))},
    "scored, two pages ahead": {"mla_decode": _decode(ScoredQueries(prefetch=2))},
    "rolled": {
        "grouped_matmul": Variant(
            grouped_matmul.grouped_matmul, {"config": grouped_matmul.MANY_TOKENS_FLOAT8[0]}
        ),
        "grouped_swiglu": Variant(
            grouped_swiglu.grouped_swiglu, {"config": grouped_swiglu.MANY_TOKENS_FLOAT8[0]}
        ),
    },
    "without pairs": _float8(),
    "pairs": _float8(paired=True),
    "panels of 2 tiles": _bfloat16(panel=2),
    "panels of 8 tiles": _bfloat16(panel=8),
    "permuted columns": _few_tokens("int8", tokens_in_order=False),
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
