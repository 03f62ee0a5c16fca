"""Cases of sparse attention in the kernel benchmark, and checks that notice wrong results."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import checks, inputs, report
from benchmarks.kernels.calls import call_of
from benchmarks.kernels.cases import cases
from benchmarks.kernels.shapes import (
    Index,
    SparseAttention,
    SparseCase,
    TopK,
    decoded,
    encoded,
    float8_arithmetic,
    key,
)
from tests.pallas_kernels.ragged_inputs import fault

TINY = [
    SparseAttention(2, 130, 2, 8, topk=40),
    SparseAttention(2, 130, 1, 8, topk=40, dtype="fp8"),
    SparseAttention(1, 100, 9, 8, topk=20, op="sparse_mla_prefill"),
    Index(2, 128, 2),
    TopK(3, 500, 40),
]
tiny = pytest.mark.parametrize("case", TINY, ids=key)


@tiny
def test_requests_carry_cases(case):
    assert decoded(json.loads(json.dumps(encoded(case)))) == case


@pytest.mark.parametrize(
    ("case", "gflop", "megabytes"),
    [
        # 2 * 64 * 128 * 2048 * 1088; 2048 tokens of 1152 bytes, queries, results and indices.
        (SparseAttention(64, 32768, 1, 128), 36.507, 64 * (2.359 + 0.2790 + 0.0082)),
        # Queries share the tokens of a sequence.
        (SparseAttention(1, 8192, 4096, 128, op="sparse_mla_prefill"), 2336.5, 9.437 + 1176.5),
        # 2 * 64 * 128 per token; 132 bytes to read and 4 to write.
        (Index(64, 32768, 1), 34.36, 64 * 32768 * 136 / 1e6 + 0.54),
        (TopK(64, 32768), 0, 64 * 4 * (32768 + 2048) / 1e6),
    ],
)
def test_flops_and_bytes(case, gflop, megabytes):
    assert case.flops / 1e9 == pytest.approx(gflop, rel=1e-3)
    assert case.bytes / 1e6 == pytest.approx(megabytes, rel=1e-3)
    assert float8_arithmetic(case) == isinstance(case, Index)


def test_roofs():
    """Memory limits the indexer and the selection, arithmetic limits attention."""
    best = {"bf16_tflops": 700.0, "fp8_tflops": 1300.0, "read_gbs": 4393.0}
    roofs = [
        report.roof_us(case, best)
        for case in (Index(64, 32768, 1), SparseAttention(64, 32768, 1, 128), TopK(64, 32768))
    ]
    assert roofs == pytest.approx([64.9, 52.2, 2.0], rel=0.05)


@tiny
def test_indices_are_distinct(case):
    if isinstance(case, SparseAttention):
        indices = jax.device_get(inputs.make(case, 0)["indices"])
        for row in indices.reshape(-1, case.topk):
            chosen = row[row >= 0]
            assert len(set(chosen.tolist())) == len(chosen) > 0
            assert chosen.max() < case.cached


@pytest.mark.slow
@tiny
def test_checks_detect_wrong_results(case):
    assert fault(case, "reference", runs=2) is None
    arrays = inputs.make(case, 0)
    spot = jax.jit(functools.partial(checks.spot, case))

    def judged(*result):
        return str(checks.verdict(spot(arrays, result)))

    out, lse = call_of(case, "reference")(arrays)
    assert judged(out, lse) == "None"
    if isinstance(case, TopK):
        assert "relative error" in judged(out.at[-1, 7].add(1), lse)
        return
    assert "relative error" in judged(out * 1.1, lse)
    assert "relative error" in judged(out.at[-1, -1, 0].set(jnp.nan), lse)
    if isinstance(case, Index):
        assert "relative error" in judged(jnp.where(jnp.isneginf(out), 9.0, out), lse)
    else:
        assert lse is not None
        assert "LSE off by 0.1" in judged(out, lse + 0.1)


def test_every_operation_has_core_cases():
    core = {case.op for case in cases() if case.core and isinstance(case, SparseCase)}
    assert core == {"sparse_mla_decode", "sparse_mla_prefill", "sparse_index", "top_k"}
