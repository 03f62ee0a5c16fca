"""Every Hopper kernel on ragged inputs: right, and equal bits in a thousand runs.

Off the GPU only the checks themselves are tested, in ``tests/test_bench_kernels.py``.
"""

from __future__ import annotations

import pytest

from benchmarks.kernels.cases import cases, select
from benchmarks.kernels.shapes import (
    Case,
    Decode,
    Gradient,
    Grouped,
    Index,
    Prefill,
    SparseAttention,
    TopK,
)
from tests.pallas_kernels.machine import on_gpu
from tests.pallas_kernels.ragged_inputs import fault

RUNS = 1000


def kind(case: Case) -> str:
    """Returns the shapes that choose a kernel and its settings."""
    if isinstance(case, Decode):
        return f"{case.op} {case.dtype} h{case.heads} sq{case.queries}"
    if isinstance(case, Gradient):
        return f"{case.op} {case.of} {case.N}x{case.K}"
    if isinstance(case, Grouped):
        return f"{case.op} {case.dtype} {case.N}x{case.K}"
    if isinstance(case, Prefill):
        return f"{case.op} {case.K}/{case.V}"
    if isinstance(case, TopK):
        return f"{case.op} k{case.k}"
    heads = f" h{case.heads}" if isinstance(case, SparseAttention) else ""
    assert isinstance(case, SparseAttention | Index)
    return f"{case.op} {case.dtype}{heads} sq{min(case.queries, 5)}"


KINDS = {kind(case): case for case in select(cases(), (), (), everything=False)}


@on_gpu
@pytest.mark.parametrize("name", KINDS)
def test_ragged_inputs(name):
    assert fault(KINDS[name], "mosaic_gpu", RUNS) is None
