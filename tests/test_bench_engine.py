"""The serving benchmark's options and tables."""

from __future__ import annotations

import shlex

from dsv3_jax.engine.dispatch_times import DispatchFigures, ShapeTimes
from scripts import bench_engine


def test_buckets_of_the_command_line():
    sizes = "--decodes 2 8 --chunks 1 4 --chunk-tokens 64 --contexts 0 256 --max-running 32"
    buckets = bench_engine.buckets(bench_engine.parse(shlex.split(sizes)))
    assert buckets.decodes == (2, 8, 32)
    assert buckets.chunks == (1, 4)
    assert buckets.chunk_tokens == 64
    assert buckets.contexts == (0, 256)


def test_the_histogram_begins_with_the_shape_that_took_longest():
    shapes = {"decodes=4": ShapeTimes(10, 0.5), "decodes=64 chunks=2": ShapeTimes(100, 1.5)}
    figures = DispatchFigures(0.1, 2.0, 0.5, shapes)
    assert bench_engine.histogram(figures.as_json()).splitlines() == [
        "no dispatch in flight: 20.0% of the time under load",
        "  steps   seconds  share       ms  shape",
        "    100     1.500  75.0%    15.00  decodes=64 chunks=2",
        "     10     0.500  25.0%    50.00  decodes=4",
    ]
