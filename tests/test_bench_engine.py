"""The serving benchmark: options and tables."""

from __future__ import annotations

import json
import shlex

import pytest

from dsv3_jax.engine.stats import DispatchFigures, ShapeTimes
from scripts import bench_engine
from tests.engine.conftest import tiny_mtp  # noqa: F401


def test_buckets_of_the_command_line():
    sizes = "--decodes 2 8 --chunks 1 4 --chunk-tokens 64 --max-running 32"
    buckets = bench_engine.buckets(bench_engine.parse(shlex.split(sizes)))
    assert buckets.decodes == (2, 8, 32)
    assert buckets.chunks == (1, 4)
    assert buckets.chunk_tokens == 64


def test_the_histogram_begins_with_the_shape_that_took_longest():
    shapes = {"decodes=4": ShapeTimes(10, 0.5), "decodes=64 chunks=2": ShapeTimes(100, 1.5)}
    figures = DispatchFigures(0.1, 2.0, 0.5, shapes)
    assert bench_engine.histogram(figures.as_json()).splitlines() == [
        "no dispatch in flight: 20.0% of the time under load",
        "  steps   seconds  share       ms  shape",
        "    100     1.500  75.0%    15.00  decodes=64 chunks=2",
        "     10     0.500  25.0%    50.00  decodes=4",
    ]


# One slot and one size of prefill, so that there are few programs.
SMALL = ["--max-running", "1", "--max-len", "120"]
SMALL += ["--chunks", "2", "--chunk-tokens", "16", "--max-steps", "2"]


@pytest.mark.slow
class TestCommand:
    @pytest.fixture(autouse=True)
    def tiny(self, tiny_mtp, monkeypatch):  # noqa: F811
        monkeypatch.setattr(bench_engine, "load", lambda name, weights: tiny_mtp)

    def test_replays(self, tmp_path):
        out = tmp_path / "run.json"
        words = ["--scale", "0.02", "--offline-count", "6", "--count", "3", "--rates", "50"]
        assert bench_engine.main([*words, *SMALL, "--out", str(out)]) == 0
        replays = json.loads(out.read_text("utf-8"))["replays"]
        assert [(each["rate"], each["requests"]) for each in replays] == [(None, 6), (50.0, 3)]
        assert all(each["output_tokens_per_second"] > 0 for each in replays)
