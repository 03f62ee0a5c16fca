"""Kernels and settings that no call uses by default.

``python -m scripts.bench_kernels --variants NAME ...`` checks them and times them in turn with the
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.kernels.shapes import Case
from pallas_kernels.grouped_matmul import few_tokens
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.grouped_swiglu import mosaic_gpu as grouped_swiglu
from pallas_kernels.sparse_index import mosaic_gpu as sparse_index
from pallas_kernels.sparse_index.mosaic_gpu_kernel import plan as index_plan
from pallas_kernels.sparse_mla_decode import mosaic_gpu as sparse_mla_decode
from pallas_kernels.sparse_mla_decode.mosaic_gpu_kernel import Config as SparseConfig
from pallas_kernels.sparse_mla_prefill import mosaic_gpu as sparse_mla_prefill
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


def _index(**settings: Any) -> dict[str, Variant]:
    """Returns the kernel of sparse_index with ``settings`` instead of the default ones."""

    def score(**arguments: Any) -> jax.Array:
        q, tables = arguments["q"], arguments["block_tables"]
        B, T, J, _ = q.shape
        plan = index_plan(B, T, J, tables.shape[1], q.dtype.itemsize)
        config = dataclasses.replace(plan, **settings)
        if config == plan or plan.groups > 1:
            raise NotImplementedError(f"the setting is for other shapes than {q.shape}")
        return sparse_index.sparse_index(**arguments, config=config)

    return {"sparse_index": Variant(score, {})}


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


def _top_k(**keywords: int) -> dict[str, Variant]:
    return {"top_k": Variant(top_k.top_k, keywords, ("fp32",))}


VARIANTS: dict[str, dict[str, Variant]] = {
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
    "prefetch": {
        "sparse_mla_decode": Variant(
            sparse_mla_decode.sparse_mla_decode,
            {"config": SparseConfig(prefetch=True)},
            ("bf16", "fp8"),
        ),
        "sparse_mla_prefill": Variant(
            sparse_mla_prefill.sparse_mla_prefill,
            {"config": SparseConfig(prefetch=True)},
            ("bf16",),
        ),
    },
    "weights in shared memory": _index(keep_weights=False),
    "1 program": _top_k(programs=1),
    "2 programs": _top_k(programs=2),
    "4 programs": _top_k(programs=4),
    "8 programs": _top_k(programs=8),
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
