"""Arrivals, lengths and day curves."""

from __future__ import annotations

import numpy as np
import pytest

from dsv3_jax.simulator.workload import Lengths, SubmitCosts, poisson, replayed
from dsv3_jax.traces import chat


def test_poisson_arrivals_have_the_rates_and_means():
    def rate(now: float) -> float:
        return 30.0 if now < 200 else 10.0

    lengths = Lengths(500, 0.8, 10**6), Lengths(100, 1.0, 10**6)
    arrivals = list(poisson(rate, 30.0, 400.0, *lengths, hit_share=0.5))
    times = np.array([each.seconds for each in arrivals])
    assert (np.diff(times) >= 0).all()
    assert (times < 200).sum() == pytest.approx(6000, rel=0.05)
    assert (times >= 200).sum() == pytest.approx(2000, rel=0.1)
    prompts, outputs, stored = (
        np.array([getattr(each, name) for each in arrivals])
        for name in ("prompt_tokens", "output_tokens", "stored_tokens")
    )
    assert prompts.mean() == pytest.approx(500, rel=0.05)
    assert outputs.mean() == pytest.approx(100, rel=0.06)
    assert stored.sum() / prompts.sum() == pytest.approx(0.5, rel=0.05)
    assert (stored % 64 == 0).all()
    assert (stored < prompts).all()


def test_a_replay_has_the_arrivals_of_its_trace():
    trace = chat(20)
    arrivals = list(replayed(trace, 4.0, 10))
    assert len(arrivals) == 10
    assert arrivals[3].seconds == trace.requests[3].unit_arrival / 4
    assert all(each.seconds == 0 for each in replayed(trace, None))


def test_a_client_submits_one_request_after_the_other():
    trace, costs = chat(20), SubmitCosts(0.5, 0.01)
    first, second, third = replayed(trace, None, 3, submit=costs)
    ends = np.cumsum([0.5 + 0.01 * each.prompt_tokens for each in trace.requests[:3]])
    assert [each.seconds for each in (first, second, third)] == pytest.approx(ends)
    assert {each.client_busy for each in (first, second, third)} == {third.seconds}
    # At a low rate it waits between them.
    for each, traced in zip(replayed(trace, 1e-6, 10, submit=costs), trace.requests, strict=False):
        end = 1e6 * traced.unit_arrival + costs.of(traced.prompt_tokens)
        assert each.seconds == each.client_busy == pytest.approx(end)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": 0.0}, "seconds: expected a number above 0, got 0.0"),
        ({"hit_share": 1.0}, "hit_share: expected 0 or more and below 1, got 1.0"),
    ],
)
def test_refused_workloads(change, message):
    settings = {"seconds": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        next(
            poisson(
                lambda now: 1.0, 1.0, prompts=Lengths(9, 0, 9), outputs=Lengths(9, 0, 9), **settings
            )
        )
