"""The pure functions of scripts/bench_kernels.py, and a whole run with tiny shapes on a CPU."""

import dataclasses
import functools
import json
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import calls, checks, clock, hlo, inputs, ours, pack_peers, report
from benchmarks.kernels.calls import call_of
from benchmarks.kernels.cases import cases, few_sizes, ragged, select, uniform_lengths, zipf_sizes
from benchmarks.kernels.jax_timing import counted, program
from benchmarks.kernels.ours import Session
from benchmarks.kernels.shapes import (
    CALLS,
    OPS,
    PAGE,
    Decode,
    Gradient,
    Grouped,
    Prefill,
    PrefillGradient,
    Swiglu,
    SwigluUnderGradient,
    decoded,
    encoded,
    guessed_us,
    key,
    page_tables,
    rotation,
)
from benchmarks.kernels.workers import Worker
from scripts import bench_kernels
from tests.pallas_kernels import ragged_inputs
from tests.pallas_kernels.ragged_inputs import fault

TINY = [
    Decode(3, 100, 2, 4),
    Grouped("g3", (3, 0, 4), 136, 264, "bf16", "both"),
    Grouped("g3", (3, 0, 4), 136, 264, "fp8", "both"),
    Grouped("g2", (9, 30), 136, 264, "int8", "both"),
    Grouped("g3", (3, 0, 4), 136, 264, "int4", "both"),
    Prefill(2, 40, 70, 2, 64, 64),
    PrefillGradient(2, 70, 70, 2, 64, 64),
    Gradient("g3", (3, 0, 4), 136, 264, "bf16", "both", of="rows"),
    Gradient("g3", (3, 0, 4), 136, 264, "bf16", "both", of="matrices"),
    Swiglu("g3", (3, 0, 4), 136, 264, "bf16", "both"),
    Swiglu("g3", (3, 0, 4), 136, 264, "fp8", "both"),
    SwigluUnderGradient("g3", (3, 0, 4), 136, 264, "bf16", "both"),
    Decode(3, 100, 2, 4, dtype="fp8"),
    ragged("2-150", (2, 150, 65), 2, 4),
]
BEST = {"bf16_tflops": 650.0, "fp8_tflops": 1250.0, "read_gbs": 4393.0}


def test_every_case_is_named_once():
    every = cases()
    assert len({key(case) for case in every}) == len(every)
    assert {case.op for case in every} == set(OPS)
    core = select(every, (), (), everything=False)
    assert 0 < len(core) < len(select(every, (), (), everything=True)) == len(every)
    assert every[: len(core)] == core
    assert [
        key(c) for c in select(every, ["mla_decode"], ["b64 kv4096 sq1"], everything=False)
    ] == [f"mla_decode bf16 h{h} b64 kv4096 sq1" for h in (128, 64, 16)]
    uneven = [c for c in core if isinstance(c, Decode) and c.ragged]
    assert {(c.heads, c.dtype) for c in uneven} >= {(128, "bf16"), (16, "bf16"), (128, "fp8")}
    assert select(every, ["mla_prefill"], ["h16"], everything=True) == []


def test_sizes():
    sizes = zipf_sizes(8192, 256)
    assert sum(sizes) == 8192
    assert len(sizes) == 256
    assert (min(sizes), int(np.median(sizes)), max(sizes)) == (9, 16, 764)
    assert set(few_sizes(256)) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("case", "gflop", "megabytes"),
    [
        # 2 * 64 * 4096 * 128 * (576 + 512); the cache, and per query 576 + 512 values and an LSE.
        (Decode(64, 4096, 1, 128), 73.014, 301.990 + 17.826 + 0.033),
        (Decode(1, 4096, 2, 128), 2.2814, 4.7186 + 0.557 + 0.001),  # 4096 and 4095 tokens
        (Grouped("", (4096,) * 8, 4096, 7168, "bf16", "both"), 1924.145, 1208.0),
        (ragged("", (2, 4094), 2, 128), 2.2811, 4.7186 + 2 * 0.557 + 0.002),
        # Weights of the six nonempty groups; scales per row and 128 columns, and per block.
        (Grouped("", (2, 2, 0, 2, 2, 2, 2, 0), 256, 256, "fp8", "both"), 0.0015729, 0.402624),
        (Grouped("", (1, 1), 256, 256, "int8", "both"), 0.000262144, 0.135168),
        (Grouped("", (1, 1), 256, 256, "int4", "both"), 0.000262144, 0.0717),
        (Swiglu("", (1, 1), 256, 256, "bf16", "both"), 0.000524288, 0.526336),
        # 2 * 128 * 320 * 8192 * 8193 / 2
        (Prefill(1, 8192, 8192), 2749.1, 4 * 8192 * 128 * 320 / 1e6 + 4.19),
        (Prefill(1, 2048, 8192), 1202.7, 2 * 10240 * 128 * 320 / 1e6 + 1.05),
        # 2 * 16 * 832 * 4096 * 4097 / 2; operands, results and gradients, and an LSE
        (PrefillGradient(1, 4096, 4096, 16), 223.39, 8 * 4096 * 16 * 320 / 1e6 + 0.262),
    ],
)
def test_flops_and_bytes(case, gflop, megabytes):
    np.testing.assert_allclose([case.flops / 1e9, case.bytes / 1e6], [gflop, megabytes], rtol=1e-3)


@pytest.mark.parametrize("case", TINY, ids=key)
def test_bytes_are_those_of_the_arrays(case):
    """For cases whose groups all have rows and whose pages are full."""
    if isinstance(case, Decode):
        case = Decode(3, 128, 2, 4, dtype=case.dtype)
    elif isinstance(case, Grouped):
        width = 136 + 120 * isinstance(case, Swiglu)
        case = dataclasses.replace(case, name="", sizes=(3, 2), N=width)
    arrays = inputs.structs(case)
    results = jax.eval_shape(call_of(case, "reference"), arrays)
    sizes = ("lengths", "group_sizes", "starts", "block_tables")
    moved = [x for name, x in arrays.items() if name not in sizes] + jax.tree.leaves(results)
    assert case.bytes == sum(x.size * x.dtype.itemsize for x in moved)


def test_rotation():
    for case in cases():
        sets, laps = rotation(case, guessed_us(case))
        assert sets >= 2
        assert sets * laps <= CALLS
        assert sets * case.bytes >= 320e6 or sets == CALLS
        assert sets * laps * guessed_us(case) >= 160  # us; launching takes about 10


@pytest.mark.parametrize("case", TINY, ids=key)
def test_requests_carry_cases(case):
    assert decoded(json.loads(json.dumps(encoded(case)))) == case


def test_lengths():
    lengths = uniform_lengths(64, 8192)
    assert (len(lengths), max(lengths)) == (64, 8192)
    assert min(lengths) < 400
    assert sum(lengths) / 64 == pytest.approx(4096, rel=0.15)
    case = ragged("2-150", (2, 150, 65), 2, 4)
    assert (case.rows, case.cached, case.shape) == (3, 150, "h4 b3 kv2-150 sq2")
    tables = page_tables(case, 0)
    assert tables.shape == (3, 3)
    pages_by_sequence = [
        table[: -(-n // PAGE)].tolist() for table, n in zip(tables, case.lengths, strict=True)
    ]
    assert sorted(page for row in pages_by_sequence for page in row) == list(range(6))
    assert inputs.structs(case)["pages"].shape[0] == 6


@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("int4", 7)])
def test_integers_have_mean_zero(dtype, most):
    case = Grouped("", (1, 1), 256, 512, dtype, "masked")
    rhs = np.asarray(inputs.make(case, 0)["rhs"])
    if dtype == "int4":
        halves = np.stack([rhs & 15, rhs >> 4], -1).astype(np.int8)
        rhs = np.where(halves < 8, halves, halves - 16)
    assert (rhs.min(), rhs.max()) == (-most, most)
    assert abs(rhs.mean()) < 3 * rhs.std() / rhs.size**0.5


def test_rows():
    case = Grouped("g8 m4096", (4096,) * 8, 4096, 7168, "fp8", "both")
    roof = case.flops / 1250e12 * 1e6
    peers = {"slow": {"us": 3 * roof}, "good": {"us": 1.5 * roof}, "broken": {"error": "wrong"}}
    row = report.row(case, {"us": 1.25 * roof, "sets": 2, "compile_s": 1.0}, peers, BEST)
    assert "no_peer" not in row
    assert row["peer"] == "good"
    values = [row[name] for name in ("tflops", "roof_fraction", "ratio")]
    np.testing.assert_allclose(values, [1000, 0.8, 1.2], rtol=1e-3)
    assert row["peers"]["broken"] == {"error": "wrong"}
    json.dumps(row, allow_nan=False)
    # Few rows are limited by bandwidth. XLA's lowering is a peer like the others.
    case = Decode(64, 4096, 1, 16)
    least = case.bytes / BEST["read_gbs"] / 1e3
    ours = {"us": 2 * least, "xla": {"us": 400.0}}
    row = report.row(case, ours, {}, BEST)
    assert (row["roof_fraction"], row["peer"], row["peer_us"]) == (0.5, "XLA", 400.0)
    # A result that exceeds the ceilings has no time and no ratio.
    row = report.row(case, {"us": least / 1.2}, {"other": {"us": 400.0}}, BEST)
    assert (row["us"], row["ratio"], row["roof_fraction"]) == (None, None, None)
    assert "is 1.2 times what the ceilings allow" in row["error"]


@pytest.mark.parametrize(
    ("ours", "best", "no_ratio"),
    [
        (0.1, 0.1, None),
        (0.11, 0.1, "spread of ours 11%"),
        (0.02, 0.5, "spread of good 50%"),
        (0.2, 0.3, "spread of ours 20%, spread of good 30%"),
    ],
)
def test_no_ratio_of_unsteady_times(ours, best, no_ratio):
    peers = {"good": {"us": 90.0, "spread": best}, "slow": {"us": 95.0, "spread": 0.9}}
    mine = {"us": 100.0, "spread": ours, "tries": 3}
    row = report.row(TINY[0], mine, peers, BEST)
    assert row.get("no_ratio") == no_ratio
    assert row["ratio"] == (0.9 if no_ratio is None else None)
    assert (row["us"], row["peer_us"], row["tries"]) == (100.0, 90.0, 3)
    assert report.steady(mine, peers) == report.complete(row) == (no_ratio is None)


def test_rows_without_times():
    case = Prefill(1, 8192, 8192)
    ours = {"us": 10.0, "xla": {"error": "does not fit"}}
    row = report.row(case, ours, {"other": {"error": "no module"}}, BEST)
    assert (row["peer"], row["peer_us"], row["ratio"]) == (None, None, None)
    assert row["no_peer"] == "other: no module; XLA: does not fit"
    assert report.row(case, {"us": 10.0}, {}, BEST)["no_peer"] == "none was requested"
    row = report.row(case, {"error": "wrong: 0.1"}, {"other": {"us": 5.0}}, {})
    assert (row["us"], row["ratio"], row["roof_fraction"]) == (None, None, None)
    assert (row["peer_us"], row["error"]) == (5.0, "wrong: 0.1")
    assert "[wrong: 0.1]" in report.line(row)


def test_ceilings():
    measured = {"xla_bf16_tflops": 600.0, "torch_bf16_tflops": 650.0, "xla_copy_gbs": 4000.0}
    measured |= {"torch_read_sum_gbs": 4300.0, "torch_fp8": "RuntimeError: none"}
    assert report.ceilings(measured, "none") == {"bf16_tflops": 650.0}
    of_h200 = report.ceilings(measured, "NVIDIA H200")
    assert of_h200 == {"bf16_tflops": 650.0, "read_gbs": 4393.0}
    assert report.ceilings({}, "NVIDIA H100 80GB HBM3")["read_gbs"] < 3400
    assert report.roof_us(TINY[2], of_h200) is None
    assert report.roof_us(TINY[0], of_h200) is not None
    assert report.roof_us(TINY[0], report.ceilings(measured, "cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    # Decode over sequences of one length is left out: ragged lengths take the same code path.
    TINY[1:],
    ids=key,
)
def test_checks_detect_wrong_results(case):
    assert fault(case, "reference", runs=2) is None
    arrays = inputs.make(case, 0)
    spot = jax.jit(functools.partial(checks.spot, case))

    def judged(*result):
        return str(checks.verdict(spot(arrays, result)))

    out, lse = call_of(case, "reference")(arrays)
    assert judged(out, lse) == "None"
    for wrong in (lambda x: x * 1.1, lambda x: x.at[-1].set(jnp.nan)):
        assert "relative error" in judged(jax.tree.map(wrong, out), lse)
    if lse is not None:
        assert "LSE off by 0.1" in judged(out, lse + 0.1)


@pytest.mark.parametrize("case", [case for case in TINY if isinstance(case, Grouped)], ids=key)
def test_ragged_groups(case):
    """Groups have few, many or no rows, within the limits of the kernels."""
    sets = [ragged_inputs.ragged(case, seed) for seed in ragged_inputs.seeds(case)]
    means = []
    for each in sets:
        assert isinstance(each.case, Grouped)
        sizes = each.host["group_sizes"]
        assert {0, 1} <= set(sizes.tolist())
        of_matrices = isinstance(case, Gradient) and case.of == "matrices"
        assert each.rows == (None if of_matrices else sum(sizes))
        assert sum(sizes) < each.case.M
        means.append(each.case.M / len(sizes))
    assert means[0] < 8
    if case.dtype in ("int8", "int4"):
        assert 48 < means[-1] <= 64
    else:
        assert means[-1] > 128


@pytest.mark.parametrize("odd", [None, 7])
def test_results_that_differ_between_runs(odd, monkeypatch):
    """Differences are found even if they are smaller than a rounding to bfloat16."""
    count = iter(range(100))

    def again(got, first):
        return jnp.int32(next(count) == odd)

    monkeypatch.setattr(ragged_inputs, "unequal", again)
    differ = "results differ between 20 equal runs (ragged inputs 0)"
    assert fault(TINY[-2], "reference", runs=20) == (None if odd is None else differ)


def test_nan_differs_from_itself():
    x = jnp.asarray([1, jnp.nan, -jnp.inf])
    assert int(checks.unequal((x, None), (x, None))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [TINY[0], TINY[-1]], ids=key)
def test_xla_decodes_from_a_dense_cache(case):
    session = Session("reference", most_calls=2)
    prepared = session.prepare(encoded(case), ["xla"])
    assert "error" not in prepared["xla"], prepared
    times = session.time(["xla"], 0.0)["xla"]
    assert len(times["us"]) == 5
    assert min(times["us"]) > 0, times


def test_xla_does_not_fill_a_cache_that_is_almost_empty():
    why = calls.xla_call(ragged("", [10] * 63 + [5000], 1, 16))
    assert why == "a dense cache padded to the longest sequence would be almost empty"


def test_what_ours_reads_besides_is_not_xlas(monkeypatch):
    case = TINY[1]
    besides = jax.ShapeDtypeStruct((), jnp.int32)
    monkeypatch.setattr(ours, "plan", lambda case, arrays: {"besides": besides})
    ours.lower_ours(case, lambda arrays: (arrays["lhs"], arrays["besides"]), 1, 1)
    assert "besides" not in inputs.structs(case)


def test_every_call_of_a_program_is_executed():
    made = []

    def call(arrays):
        jax.debug.callback(lambda _: made.append(1), arrays["q"])
        return jnp.sum(arrays["q"]), None

    sets = [{"q": jnp.ones(4)}, {"q": jnp.zeros(4)}]
    results, _ = jax.jit(program(call, laps=3))(sets)
    jax.effects_barrier()
    assert [float(x) for x in results] == [4, 0, 4, 0, 4, 0]
    assert len(made) == 6


def test_all_arguments_depend_on_the_previous_call():
    """XLA could compute anything from an argument without dependencies once for all laps."""
    schedule = {"split": jnp.zeros(2), "table": jnp.zeros(3)}
    sets = [{"lengths": jnp.zeros(4), "schedule": schedule}]
    made = jax.make_jaxpr(program(lambda x: (x["schedule"]["split"], None), laps=2))(sets)
    (barrier,) = (e for e in made.eqns if e.primitive.name == "optimization_barrier")
    assert sorted(x.aval.shape for x in barrier.invars) == [(2,), (2,), (3,), (4,)]


def test_stamps_enclose_the_calls():
    """Each depends on its predecessor: the first stamp, the calls, the second stamp."""

    def stamp(x):
        return jax.lax.custom_linear_solve(lambda y: y, x, lambda _, y: y)  # visible in the jaxpr

    def run(sets, start):
        return program(lambda x: (jnp.sin(x["q"]), None), 2, stamp)(sets, start)

    sets = [{"q": jnp.ones(3)}, {"q": jnp.ones(3)}]
    made = jax.make_jaxpr(run)(sets, jnp.zeros(4))
    names = [e.primitive.name for e in made.eqns]
    wait = "optimization_barrier"
    calls = [wait, "jit"] * 4
    assert names == ["custom_linear_solve", *calls, wait, "custom_linear_solve"]
    results, stamps = run(sets, jnp.zeros(4))
    assert (len(results), len(stamps)) == (4, 2)


def test_clock():
    stamps = [(2**32 - 1000, 1000), (3000, 7032)]
    assert [clock.span_us(*each) for each in stamps] == [2.0, 4.032]
    assert clock.mean_us(stamps) == pytest.approx(3.016)
    assert clock.busy(stamps) == pytest.approx(6.032 / 8.032)


@pytest.mark.parametrize(("count", "laps", "left"), [(6, 1, 6), (2, 3, 2)])
def test_merged_calls_are_found(count, laps, left):
    """XLA merges equal independent calls. On a CPU a factorisation is one custom call, like a
    kernel on a GPU."""

    def run(sets):
        return [jnp.linalg.cholesky(arrays["x"]) for _ in range(laps) for arrays in sets]

    sets = [{"x": jnp.eye(3) * (i + 1)} for i in range(count)]
    lowered = jax.jit(run).lower(sets)
    target = r"lapack_spotrf\w*"
    executable = lowered.compile()
    assert hlo.asked(lowered.as_text(), target) == 6
    text = executable.as_text()
    assert text is not None
    assert hlo.launched(text, target)[0] == left
    counts = counted(lowered, executable, 6, kernels=True, target=target)
    if left == 6:
        assert counts["kernels_a_call"] >= 1
    else:
        assert counts["error"] == "wrong: 2 of 6 kernels are left of 6 calls"


def test_calls_without_a_kernel_are_found():
    lowered = jax.jit(jnp.sin).lower(1.0)
    executable = lowered.compile()
    assert "kernels_a_call" in counted(lowered, executable, 2, kernels=False)
    assert "0 of 0 kernels" in counted(lowered, executable, 2, kernels=True)["error"]


def test_kernels_are_counted_through_calls():
    text = """HloModule jit_run, is_scheduled=true

%fused (p.1: s32[8]) -> s32[8] {
  %p.1 = s32[8]{0} parameter(0)
  ROOT %neg.1 = s32[8]{0} negate(%p.1)
}

%command_buffer (p: s32[8]) -> (s32[8], /*index=1*/f32[2,2]) {
  %p = s32[8]{0} parameter(0)
  %a = (s32[8]{0}, f32[2,2]{1,0:T(2,128)}) custom-call(%p), custom_call_target="mosaic_gpu_v2"
  %b = s32[8]{0} get-tuple-element(%a), index=0
  ROOT %c = s32[8]{0} fusion(%b), kind=kLoop, calls=%fused
}

ENTRY %main.4 (x: s32[8]) -> s32[8] {
  %x = s32[8]{0} parameter(0)
  %one = s32[8]{0} call(%x), to_apply=%command_buffer
  %two = s32[8]{0} copy(%one)
  ROOT %three = s32[8]{0} custom-call(%two), custom_call_target="other"
}
"""
    assert hlo.launched(text) == (1, 4)


def test_operations_outside_the_stamps_are_found():
    def line(name, what, op="x"):
        return f'  %{name} = {what}(%p), metadata={{op_name="jit(run)/{op}/y"}}'

    stamp, call = "s32[128]{0} custom-call", "bf16[8]{0} custom-call"
    inside = [line("a", stamp, clock.KERNEL), line("b", call), line("c", stamp, clock.KERNEL)]
    counter, copied = line("d", "s32[1]{0} copy"), line("e", "s32[8]{0} copy")

    def outside(*lines):
        text = "\n".join(["HloModule jit_run", "ENTRY %main (p: s32[8]) -> s32[8] {", *lines, "}"])
        return hlo.outside(text, clock.KERNEL)

    assert outside(*inside) == outside(counter, *inside) == []
    assert outside(copied, *inside) == outside(*inside, copied) == [copied.strip()]
    assert outside(*inside[1:]) is None


def test_slow_peers_are_timed_once():
    def close(**windows):
        return report.names_to_time({n: {"windows": {"us": us}} for n, us in windows.items()})

    assert report.names_to_time({"a": {}, "b": {"windows": {"us": [3.0]}}}) == ["a"]
    assert close() == []
    assert close(a=[9.0, 10.0, 30.0], b=[12.9], c=[13.1]) == ["a", "b"]
    assert close(xla=[9.0], ours=[99.0]) == ["xla", "ours"]


class FakeWorker(Worker):
    """Worker that returns ``replies`` in order."""

    def __init__(self, *replies):
        self.asked, self._replies_left = [], iter(replies)

    def ask(self, request, timeout):
        self.asked.append(request)
        return next(self._replies_left)


def timed(of_ours: FakeWorker, of_peers: FakeWorker, ours, peers):
    bench = bench_kernels.Bench(bench_kernels.parse([]))
    bench._ours, bench._peers = of_ours, of_peers
    bench._time(ours, peers)
    return ours, peers


def timings(**us):
    return {name: {"us": windows} for name, windows in us.items()}


def test_order_of_timings():
    """The order is peers, ours, ours, peers; a slow peer is timed only once."""
    of_ours = FakeWorker(timings(ours=[12.0, 12.1]), timings(ours=[12.0, 12.2, 12.3]))
    first = {"a": {"us": [11.9, 12.0], "busy": 0.9}, "b": {"us": [20.0, 20.0]}}
    of_peers = FakeWorker(first, {"a": {"us": [12.4], "busy": 0.8}})
    ours, peers = timed(of_ours, of_peers, {"sets": 2}, {"a": {}, "b": {}, "c": {"error": "none"}})
    assert [r["names"] for r in of_peers.asked] == [["a", "b"], ["a"]]
    assert [r["warm_s"] for r in of_ours.asked] == [1.0, 0.3]
    spread = pytest.approx(0.3 / 12.1, abs=1e-4)
    assert ours == {"sets": 2, "us": 12.1, "spread": spread, "tries": 1}
    assert peers["a"] == {"us": 12.0, "spread": pytest.approx(0.5 / 12, abs=1e-4), "busy": 0.8}
    assert peers["b"] == {"us": 20.0, "spread": 0.0}
    assert peers["c"] == {"error": "none"}


@pytest.mark.parametrize(("steady_at", "tries", "spread"), [(1, 1, 0.0), (2, 2, 0.0), (9, 3, 0.5)])
def test_unsteady_times_are_measured_again(steady_at, tries, spread):
    turns = [timings(ours=[10.0, 10.0 if n >= steady_at else 15.0]) for n in (1, 1, 2, 2, 3, 3)]
    of_ours, of_peers = FakeWorker(*turns), FakeWorker(*[timings(a=[9.0])] * 6)
    ours, peers = timed(of_ours, of_peers, {}, {"a": {}})
    assert (ours["tries"], peers["a"]["us"]) == (tries, 9.0)
    assert ours["spread"] == pytest.approx(spread, abs=0.15)
    assert [r["warm_s"] for r in of_ours.asked] == [1.0, 0.3, *[1.0] * 4][: 2 * tries]


def test_xla_is_timed_beside_ours():
    both = timings(ours=[10.0], xla=[9.0])
    of_ours = FakeWorker(both, both)
    ours, _ = timed(of_ours, FakeWorker(), {"xla": {}}, {})
    assert [r["names"] for r in of_ours.asked] == [["ours", "xla"]] * 2
    assert ours["xla"] == {"us": 9.0, "spread": 0.0}
    assert report.row(TINY[0], ours, {}, BEST)["ratio"] == 0.9


def test_failure_while_timing():
    of_ours = FakeWorker(timings(ours=[10.0]), {"error": "it hung"})
    ours, peers = timed(of_ours, FakeWorker({"error": "it died"}), {}, {"a": {}})
    assert ours["error"] == "it hung"
    assert peers == {"a": {"error": "it died"}}
    assert report.row(TINY[0], ours, peers, BEST)["us"] is None


def result_of(words, chosen, out):
    bench = bench_kernels.Bench(bench_kernels.parse(words))
    try:
        bench.run(chosen)
    finally:
        bench.stop()
    return json.loads(out.read_text())


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    out = tmp_path / "kernels.json"
    words = ["--implementation", "reference", "--calls", "2", "--out", str(out)]
    result = result_of(words, [TINY[1], TINY[5]], out)
    assert {"date", "machine", "versions", "gpu", "ceilings", "rows"} <= set(result)
    assert {"python", "jax", "jaxlib"} <= set(result["versions"])
    assert {"xla_bf16_tflops", "best_bf16_tflops"} <= set(result["ceilings"])
    assert "read_gbs" not in result["ceilings"], "that of a CPU is not known"
    assert result["clock"] == {"ours": "time.perf_counter"}
    for case, row in zip([TINY[1], TINY[5]], result["rows"], strict=True):
        assert (row["op"], row["shape"], row["dtype"]) == (case.op, case.shape, case.dtype)
        assert row["us"] > 0, row
        assert (row["ratio"] is not None) + ("no_peer" in row) + ("no_ratio" in row) == 1
    assert "all scores at once" in result["rows"][1]["no_peer"]


@pytest.mark.slow
def test_refused_op_is_not_timed(tmp_path):
    out = tmp_path / "kernels.json"
    words = ["--implementation", "mosaic_gpu", "--calls", "2", "--out", str(out)]
    (row,) = result_of(words, [TINY[1]], out)["rows"]
    assert row["us"] is None
    assert row["error"].startswith(("NotImplementedError", "ValueError"))
    assert "peers" in row


def test_resume(tmp_path):
    first, out = tmp_path / "first.json", tmp_path / "second.json"
    done = report.row(TINY[0], {"us": 10.0, "spread": 0.01}, {}, BEST)
    varied = report.row(TINY[1], {"us": 10.0, "spread": 0.3}, {"a": {"us": 9.0}}, BEST)
    first.write_text(json.dumps({"date": "2026-11-22", "gpu": "x", "rows": [done, varied]}))
    bench = bench_kernels.Bench(
        bench_kernels.parse(["--resume", str(first), "--out", str(out), "--time-budget", "-1"])
    )
    assert bench.remaining(TINY[:2]) == [TINY[1]]
    bench.save()
    result = json.loads(out.read_text())
    assert result["earlier"] == [{"date": "2026-11-22", "gpu": "x"}]
    assert [(row["us"], row["run"]) for row in result["rows"]] == [(10.0, 0)]


def test_no_time_budget(tmp_path):
    out = tmp_path / "kernels.json"
    words = [
        "--implementation",
        "reference",
        "--calls",
        "2",
        "--out",
        str(out),
        "--time-budget",
        "-1",
    ]
    result = result_of(words, TINY[:2], out)
    assert result["rows"] == []
    assert result["not_run"] == [key(case) for case in TINY[:2]]


def test_worker_that_dies_or_hangs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "child.py").write_text(
        "import os, sys, time\n"
        "from benchmarks.kernels.workers import serve\n"
        "def die(): print('last words', file=sys.stderr, flush=True); os._exit(3)\n"
        "def fail(): raise RuntimeError('no  luck')\n"
        "def sleep(seconds): time.sleep(seconds)\n"
        "serve({'sleep': sleep, 'die': die, 'fail': fail, 'echo': lambda x: {'x': x}})\n"
    )
    worker = Worker("child", [], str(tmp_path / "log"))
    try:
        assert worker.ask({"do": "echo", "x": 1}, 60) == {"x": 1}
        assert worker.ask({"do": "fail"}, 60) == {"error": "RuntimeError: no luck"}
        worker.send({"do": "echo", "x": 2})
        assert worker.ask({"do": "echo", "x": 3}, 60) == {"x": 3}
        ended = worker.ask({"do": "die"}, 60)["error"]
        assert "status 3" in ended
        assert "last words" in ended
        assert worker.ask({"do": "echo", "x": 4}, 60) == {"x": 4}
        assert worker.ask({"do": "sleep", "seconds": 60}, 1) == {"error": "no reply within 1 s"}
        assert worker.ask({"do": "echo", "x": 5}, 60) == {"x": 5}
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("vllm/_flashmla_C.abi3.so", "flash_mla.so"),
        ("vllm/third_party/deep_gemm/__init__.py", "deep_gemm/__init__.py"),
        ("vllm/third_party/deep_gemm/_C.cpython-312-x.so", "deep_gemm/_C.cpython-312-x.so"),
        ("vllm/third_party/deep_gemm/_C.cpython-311-x.so", None),
        ("vllm/_moe_C.abi3.so", "moe.so"),
        ("vllm/_C.abi3.so", None),
    ],
)
def test_packed_names(name, to):
    assert pack_peers.packed_name(name) == to


def test_machine_code_of_other_gpus_is_not_packed():
    def part(kind, gpu, size):
        return struct.pack("<HHIQ12xI32x", kind, 1, 64, size, gpu) + b"x" * size

    parts = part(2, 80, 8) + part(2, 90, 16) + part(1, 80, 24)
    fat = b"\x50\xed\x55\xba" + struct.pack("<HHQ", 1, 16, len(parts)) + parts
    library = b"before" + fat + b"between\x50\xed\x55\xba" + fat + b"behind"
    packed = pack_peers.for_hopper(library)
    assert len(packed) == len(library)
    assert packed == library.replace(part(2, 80, 8), part(2, 80, 8)[:-8] + bytes(8))
