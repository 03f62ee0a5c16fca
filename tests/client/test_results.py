"""Figures of requests, computed from their times by hand."""

from __future__ import annotations

import math
import re

import pytest

from dsv3_jax.cli.arguments.servers import TRACE_NAMES
from dsv3_jax.client.completions import RequestRecord
from dsv3_jax.client.workload import Workload, details, results
from dsv3_jax.traces import TRACES
from dsv3_jax.viz.serving import LoadPoint, pareto, sweep

FIRST = RequestRecord(10, start=100.0, chunks=(0.5, 0.7, 1.0), output_tokens=6)
SECOND = RequestRecord(30, start=100.5, chunks=(1.5,), output_tokens=1)
FAILED = RequestRecord(50, start=100.6, error="status 503: queue")


def test_figures():
    figures = results([FIRST, SECOND, FAILED])
    expected = {
        "duration": 2.0,  # from 100 to 102
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 40,
        "total_output_tokens": 7,
        "request_throughput": 1.0,
        "output_throughput": 3.5,
        "total_token_throughput": 23.5,
        "max_concurrent_requests": 2,  # without the one that was refused
        "mean_ttft_ms": 1000,
        "median_ttft_ms": 1000,
        "std_ttft_ms": 500,
        "p99_ttft_ms": 1490,
        "mean_tpot_ms": 100,  # 0.5 s for five tokens; a single token has none
        "mean_itl_ms": 250,
        "p50_itl_ms": 250,
        "mean_e2el_ms": 1250,
        "p90_e2el_ms": 1450,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_the_fields_are_those_of_vllm():
    names = {f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "std", "p99")}
    names |= {"median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms"}
    names |= {"request_throughput", "output_throughput", "total_token_throughput", "duration"}
    names |= {"completed", "failed", "total_input_tokens", "total_output_tokens"}
    assert names <= set(results([FIRST]))
    assert details([FIRST, FAILED]) == {
        "input_lens": [10, 50],
        "output_lens": [6, 0],
        "start_times": [100.0, 100.6],
        "ttfts": [0.5, 0.0],
        "itls": [pytest.approx([0.2, 0.3]), []],
        "errors": ["", "status 503: queue"],
    }


def test_requests_fit_the_model():
    trace = TRACES["chat"]()
    work = Workload.of(trace, 40, scale=1.0, max_len=256, vocab_size=500)
    lengths = [len(p) + o for p, o in zip(work.prompts, work.output_tokens, strict=True)]
    assert max(lengths) == 256
    wanted = [request.prompt_tokens + request.output_tokens for request in trace.requests[:40]]
    assert [n for n, w in zip(lengths, wanted, strict=True) if w <= 256] == (
        [w for w in wanted if w <= 256]
    )
    assert work.shortened == sum(w > 256 for w in wanted)
    assert max(map(max, work.prompts)) < 500
    assert work.arrivals(2.0)[1] == trace.requests[1].unit_arrival / 2
    assert set(work.arrivals(math.inf)) == {0.0}
    assert Workload.of(trace, 40, scale=0.01, max_len=256, vocab_size=500).shortened == 0


def test_names_of_traces():
    assert set(TRACE_NAMES) == set(TRACES)


def test_the_pareto_front():
    def point(label, throughput, tpot):
        return LoadPoint(label, throughput, tpot, 1.0, 2.0)

    points = [point("1", 50, 10), point("2", 90, 15), point("3", 80, 20), point("4", 120, 40)]
    assert [p.label for p in pareto(points)] == ["1", "2", "4"]
    left, right = sweep(points, "title").axes
    assert [text.get_text() for text in left.texts] == ["1", "2", "3", "4"]
    assert [len(line.get_xdata()) for line in left.lines] == [3, 1]
    assert len(right.lines) == 2


@pytest.mark.parametrize("milliseconds", [(560, 910), (1.2, 3.4), (30, 45_000)])
def test_latencies_have_plain_labels(milliseconds):
    """Not 6 x 10^2, which an axis of less than a decade has by default."""
    low, high = milliseconds
    points = [LoadPoint("1", 50, 10, low, low), LoadPoint("2", 60, 10, high, high)]
    figure = sweep(points, "title")
    figure.draw_without_rendering()
    axis = figure.axes[1].yaxis
    below, above = axis.get_view_interval()
    majors = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    shown = [label.get_text() for at, label in majors if below <= at <= above]
    assert shown
    assert all(re.fullmatch(r"[\d,.]+", text) for text in shown)
    assert not any(label.get_text() for label in axis.get_minorticklabels())
