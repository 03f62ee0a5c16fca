"""The measurement of an engine's steps under open streams."""

from __future__ import annotations

import pytest

from scripts.bench_streams import measure


@pytest.mark.slow
def test_both_arms_do_the_same_work():
    result = measure(streams=3, new_tokens=5, rounds=1, step_seconds=0.02, one_process=True)
    (without_http,), (streams,) = result["rounds"]["without_http"], result["rounds"]["streams"]
    assert without_http["output_tokens"] == streams["output_tokens"] == 15
    assert result["step_ms_streams"] >= 20
    assert result["step_ms_without_http"] >= 20
    # An answer takes five steps. The gaps between its tokens are shorter if the client is late.
    assert streams["median_e2el_ms"] >= 100
