"""The controller of latencies, on engines in simulated time.

The simulated step takes 10 ms, 1 ms more for each decoding request and 0.02 ms more for each prompt
token, so that the best limit for a target is known.
"""

from __future__ import annotations

import numpy as np
import pytest

from dsv3_jax.engine.scheduling import step_sizes
from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest, SchedulerConfig, StepLimits
from dsv3_jax.engine.scheduling.step_sizes import LatencyTargets, SlaController
from dsv3_jax.simulator.cluster import Cluster, ClusterSettings, PoolSettings
from dsv3_jax.simulator.workload import Lengths, poisson
from tests.engine.simulated_engine import SimulatedEngine
from tests.simulator.linear_times import LinearTimes, engine

MOST = StepLimits(64, 16)
TIMES = LinearTimes(fixed=0.01, decode=0.001, prompt=0.00002)


def run(
    targets: LatencyTargets | None, rate, most_rate: float, seconds: float = 30.0, seed: int = 0
):
    """Simulates an engine. Returns the outcome, and the time and the limits of every turn."""
    settings = engine(MOST.running, MOST.chunks, targets=targets)
    cluster = Cluster(ClusterSettings(PoolSettings(1, settings, TIMES, 1, 1)))
    replica = cluster._pools["unified"].replicas[0]
    history = []
    limit = replica.scheduler.limit

    def record(limits: StepLimits) -> None:
        limit(limits)
        history.append((replica._device._free_at, limits))

    replica.scheduler.limit = record
    arrivals = poisson(
        rate, most_rate, seconds, Lengths(150, 0.6, 1500), Lengths(100, 0.5, 400), seed=seed
    )
    return cluster.run(arrivals, until=seconds), history


def limits_after(history, seconds: float) -> np.ndarray:
    return np.array([limits for at, limits in history if at >= seconds])


@pytest.mark.parametrize(
    ("tpot", "seed"),
    [
        (0.035, 0),
        *(pytest.param(t, s, marks=pytest.mark.slow) for t in (0.025, 0.05) for s in (1, 2)),
    ],
)
def test_it_converges_below_the_target_and_stays_there(tpot, seed):
    """More requests than the engine can serve: the best number of running ones is known."""
    best = (tpot - TIMES.fixed) / TIMES.decode
    outcome, history = run(LatencyTargets(tpot=tpot), lambda now: 25.0, 25.0, seed=seed)
    late = limits_after(history, 12.0)
    assert late[:, 0].max() <= best + MOST.running / 32 + 1
    # A second decrease comes after an interval in which requests above the limit still ran.
    assert late[:, 0].min() >= step_sizes.DECREASE**2 * step_sizes.MARGIN * best - 2
    assert late[:, 0].max() / late[:, 0].min() <= 1 / step_sizes.DECREASE**2 + 0.25
    tpots = [
        each.tpot for each in outcome.requests if each.first_token > 10 and each.output_tokens > 20
    ]
    assert np.median(tpots) <= tpot
    assert np.median(tpots) >= 0.6 * tpot  # it leaves no more than that unused
    unlimited, _ = run(None, lambda now: 25.0, 25.0, seed=seed)
    assert (
        np.median([each.tpot for each in unlimited.requests if each.first_token > 10]) > 1.4 * tpot
    )


def test_limits_stay_within_their_bounds():
    for targets in (LatencyTargets(tpot=1e-4), LatencyTargets(ttft=1e-4), LatencyTargets(9.0, 9.0)):
        _, history = run(targets, lambda now: 15.0, 15.0, seconds=8.0)
        limits = limits_after(history, 0.0)
        assert (limits >= 1).all()
        assert (limits <= MOST).all()


def test_an_impossible_target_leaves_one_request_and_one_chunk():
    _, history = run(LatencyTargets(tpot=1e-4), lambda now: 15.0, 15.0, seconds=12.0)
    assert limits_after(history, 11.0)[-1, 0] == 1


def test_without_load_nothing_is_limited():
    _, history = run(LatencyTargets(1.0, 0.05), lambda now: 1.0, 1.0, seconds=10.0)
    assert (limits_after(history, 0.0) == MOST).all()


def test_it_recovers_after_a_load_step():
    """Five seconds of overload, then a load that the engine serves with ease."""
    targets = LatencyTargets(ttft=0.5, tpot=0.035)
    outcome, history = run(targets, lambda now: 30.0 if 5 <= now < 10 else 3.0, 30.0, seconds=60.0)
    during = limits_after([each for each in history if each[0] < 14], 11.0)
    assert during[:, 0].max() <= (0.035 - TIMES.fixed) / TIMES.decode + 5
    late = [each for each in outcome.requests if each.submitted > 45]
    assert len(late) > 25
    assert np.mean([each.ttft <= 0.5 and each.tpot <= 0.035 for each in late]) > 0.95


def test_chunks_are_fewer_where_they_delay_tokens():
    """Decoding alone is far below the target; only steps with many chunks are above it."""
    targets = LatencyTargets(tpot=0.04)
    outcome, history = run(targets, lambda now: 4.0, 4.0)
    late = limits_after(history, 12.0)
    assert (late[:, 0] == MOST.running).all()
    steps = np.percentile([each.tpot for each in outcome.requests if each.submitted > 12], 90)
    assert steps <= 0.04


def test_targets_are_checked():
    with pytest.raises(ValueError, match="targets: expected a TTFT, a TPOT or both, got none"):
        LatencyTargets()
    with pytest.raises(ValueError, match="tpot: expected seconds above 0, got -1"):
        LatencyTargets(tpot=-1)


def test_the_scheduler_keeps_changed_limits():
    scheduler = Scheduler(SchedulerConfig(4, 16, 4), [PageAllocator(64, 16, prefix_cache=False)])
    scheduler.limit(StepLimits(2, 1))
    scheduler.add(*(ScheduledRequest([1] * 40, 60, arrival=float(i)) for i in range(4)))
    plan, _ = scheduler.schedule(0.0)
    assert plan is not None
    assert (len(scheduler.running), len(plan.chunks)) == (1, 1)
    scheduler.limit(StepLimits(2, 4))
    plan, _ = scheduler.schedule(0.0)
    assert plan is not None
    assert (len(scheduler.running), len(plan.chunks)) == (2, 4)
    for limits in (StepLimits(0, 1), StepLimits(5, 1), StepLimits(1, 5)):
        with pytest.raises(ValueError, match="expected 1 to 4, got"):
            scheduler.limit(limits)


def test_a_rest_is_no_latency():
    controller = SlaController(LatencyTargets(tpot=0.01), MOST)
    controller.rest()
    assert controller.update(0.0, None) == MOST


def test_the_engine_obeys_its_controller(monkeypatch):
    """With a target that no step can meet, requests end up running one at a time, with the tokens
    that they have without a controller."""
    monkeypatch.setattr(step_sizes, "INTERVAL", 0.0)
    monkeypatch.setattr(step_sizes, "_LEAST_SAMPLES", 1)
    simulated = SimulatedEngine(num_pages=64, max_waiting=100, latency=lambda: 0.0002)
    slots = simulated.scheduler.config.max_running
    most = StepLimits(slots, simulated.scheduler.config.max_chunks)
    controller = SlaController(LatencyTargets(tpot=1e-6), most)
    simulated.loop._steps._controller = controller
    submitted = [simulated.submit([i % 7, 5, i % 4], 8) for i in range(4 * slots)]
    running = []
    while simulated.loop.step():
        running.append(len(simulated.scheduler.running))
    assert [each.handle.result(0).tokens for each in submitted] == [s.expected for s in submitted]
    assert max(running) == slots
    assert controller.limits.running == 1
    assert max(running[-8:]) == 1
