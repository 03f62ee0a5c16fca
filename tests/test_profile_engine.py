"""The profile of an engine under load: pauses between kernels."""

from __future__ import annotations

import json

import pytest

from benchmarks.profile.trace import Event
from scripts import profile_engine


def test_pauses_are_sorted_by_length():
    # Kernels at the same time, then pauses of 4, 5, 50 and 2,000 us.
    spans = [(0, 10), (2, 6), (14, 20), (25, 30), (80, 100), (2100, 2200)]
    names = "abcdef"
    events = [
        Event(name, "", 1e3 * start, 1e3 * (end - start))
        for name, (start, end) in zip(names, spans, strict=True)
    ]
    result = profile_engine.pauses(events[::-1])
    assert result["traced_s"] == 0.0022
    assert result["idle_share"] == round((4 + 5 + 50 + 2000) / 2200, 4)
    counts = {name: group["count"] for name, group in result["pauses"].items()}
    assert counts == {
        "up to 5 us": 2,
        "up to 20 us": 0,
        "up to 100 us": 1,
        "up to 1000 us": 0,
        "over 1000 us": 1,
    }
    assert result["around"] == [
        {"before": "e", "after": "f", "count": 1, "us": 2000.0},
        {"before": "d", "after": "e", "count": 1, "us": 50.0},
    ]
    assert result["pauses"]["over 1000 us"]["share"] == round(2000 / 2200, 4)


def test_the_profilers_start_and_end_do_not_count():
    events = [Event("a", "", 1e9 * second, 1e9) for second in (7.4, 7, 5, 5.4, 5.5)]
    assert [event.start_ns for event in profile_engine.settled(events, 0.5, 1.8)] == [7e9, 5.5e9]
    assert profile_engine.settled([], 0.5, 1.0) == []


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(RuntimeError, match="expected kernels, got none"):
        profile_engine.pauses([])


@pytest.mark.slow
def test_the_command(tmp_path):
    out = tmp_path / "pauses.json"
    words = ["--model", "demo", "--max-running", "4", "--max-len", "512", "--scale", "0.1"]
    words += ["--count", "16", "--after", "0.05", "--settle", "0.05", "--seconds", "0.2"]
    words += ["--out", str(out)]
    assert profile_engine.main(words) == 0
    result = json.loads(out.read_text())
    assert result["traced_s"] > 0
    assert 0 <= result["idle_share"] < 1
    assert result["kernels"]
    assert result["dispatches"]["shapes"]
