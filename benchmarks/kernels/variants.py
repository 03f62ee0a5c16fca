"""Kernels and settings that no call uses by default, because no GPU has timed them yet.

``python -m scripts.bench_kernels --implementation NAME`` checks and times one in place of the
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.kernels.shapes import Case
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.grouped_swiglu import mosaic_gpu as grouped_swiglu
from pallas_kernels.mla_decode import mosaic_gpu as mla_decode
from pallas_kernels.mla_decode.scored_plan import ScoredQueries


@dataclasses.dataclass(frozen=True)
class Variant:
    """A setting of a back-end for the float8 cases of one operation."""

    op: Callable[..., Any]
    """The back-end's function, which takes ``config``."""

    config: Any

    def __call__(self, **arguments: Any) -> Any:
        return self.op(**arguments, config=self.config)


_UNROLLED_MATMUL = dataclasses.replace(grouped_matmul.MANY_TOKENS_FLOAT8[0], unrolled=True)
_UNROLLED_SWIGLU = dataclasses.replace(
    grouped_swiglu.MANY_TOKENS_FLOAT8[0], unrolled=True, approximate_silu=True
)

VARIANTS: dict[str, dict[str, Variant]] = {
    "scored": {"mla_decode": Variant(mla_decode.mla_decode, ScoredQueries())},
    "unrolled": {
        "grouped_matmul": Variant(grouped_matmul.grouped_matmul, _UNROLLED_MATMUL),
        "grouped_swiglu": Variant(grouped_swiglu.grouped_swiglu, _UNROLLED_SWIGLU),
    },
}
"""Variants by name and operation."""


def variant_of(case: Case, name: str) -> Variant:
    """Returns the function of a case's operation in a variant.

    Raises:
      NotImplementedError: the variant has none for the case.
    """
    ops = VARIANTS[name]
    if case.op not in ops or case.dtype != "fp8":
        raise NotImplementedError(f"{name} takes fp8 cases of {', '.join(ops)}, got {case.op}")
    return ops[case.op]
