"""Simulated engines and clusters: times of single requests, pools, hits, drafts, figures."""

from __future__ import annotations

import math

import pytest

from dsv3_jax.simulator.cluster import Cluster, ClusterSettings, Outcome, PoolSettings
from dsv3_jax.simulator.replica import HostCosts, ReplicaSettings
from dsv3_jax.simulator.report import ServiceLevel, summary
from dsv3_jax.simulator.workload import Arrival, Lengths, poisson
from tests.simulator.linear_times import LinearTimes, engine

TIMES = LinearTimes(fixed=0.01, decode=0.001, prompt=0.0001)


def pool(settings: ReplicaSettings, replicas: int = 1) -> PoolSettings:
    return PoolSettings(replicas, settings, TIMES, devices=8, nodes=1)


def run(settings: ClusterSettings, *arrivals: Arrival) -> Outcome:
    outcome = Cluster(settings).run(arrivals)
    for replica in (each for replicas in outcome.replicas.values() for each in replicas):
        replica.scheduler.check_idle()
    assert len(outcome.requests) == outcome.submitted == len(arrivals)
    return outcome


def test_the_times_of_one_request_are_those_of_its_steps():
    """Two chunks in one step, then a decode step for each further token."""
    (served,) = run(ClusterSettings(pool(engine())), Arrival(5.0, 100, 3)).requests
    assert served.ttft == pytest.approx(0.01 + 100 * 0.0001)
    assert served.tpot == pytest.approx(0.011)
    assert served.end == pytest.approx(5.0 + served.ttft + 2 * 0.011)
    assert (served.prompt_tokens, served.output_tokens) == (100, 3)


@pytest.mark.parametrize(("late", "begins"), [(False, 0.0604), (True, 0.0494)])
def test_a_request_waits_for_the_step_under_way(late, begins):
    """And for the one after it, unless that is planned late."""
    first, second = Arrival(0.0, 64, 50), Arrival(0.0401, 64, 1)
    served = run(ClusterSettings(pool(engine(plans_late=late))), first, second).requests[0]
    # Steps end at 16.4, 27.4, 38.4, 49.4 ms. The next one is planned at 38.4, or late at 45.4 ms.
    assert served.end == pytest.approx(begins + 0.01 + 0.001 + 64 * 0.0001)


def test_nothing_is_launched_while_a_client_of_the_process_submits():
    arrivals = [Arrival(0.1 * i, 64, 1, client_busy=0.55) for i in range(1, 6)]
    arrivals.append(Arrival(2.0, 64, 1, client_busy=2.0))
    settings = ClusterSettings(pool(engine(plans_late=False)))
    *five, last = run(settings, *arrivals).requests
    assert {each.submitted for each in five} == {each.seconds for each in arrivals[:5]}
    assert [each.end for each in five] == [pytest.approx(0.55 + 0.01 + 5 * 64 * 0.0001)] * 5
    assert last.end == pytest.approx(2.0 + 0.01 + 64 * 0.0001)


@pytest.mark.parametrize("shards", [1, 2])
def test_prompts_do_not_wait_on_the_shard_of_a_long_one(shards):
    """Each shard prefills two chunks in a step; the long prompt has twenty."""
    arrivals = [Arrival(0.0, 20 * 64, 2), *(Arrival(0.001 * i, 64, 2) for i in range(1, 7))]
    outcome = run(ClusterSettings(pool(engine(chunks=2, shards=shards))), *arrivals)
    served = sorted(outcome.requests, key=lambda each: each.prompt_tokens)
    long = served.pop()
    seconds = 10 * (0.01 + 128 * 0.0001)  # of its steps, without decoding requests
    assert long.ttft == pytest.approx(seconds, rel=0.2)
    for short in served:
        if shards == 1:
            assert short.ttft > 0.8 * seconds
        else:
            assert short.ttft < 0.6 * seconds


def test_host_time_is_hidden_by_longer_steps_only():
    hidden = engine(host=HostCosts(plan=0.004, read=0.004))
    slow = engine(host=HostCosts(plan=0.02, read=0.004))
    tpots = [
        run(ClusterSettings(pool(each)), Arrival(0.0, 64, 20)).requests[0].tpot
        for each in (hidden, slow)
    ]
    assert tpots[0] == pytest.approx(0.011, rel=0.01)
    assert tpots[1] == pytest.approx(0.024, rel=0.1)


def test_a_shared_prefix_is_computed_once():
    arrivals = [Arrival(float(i), 200, 2, prefix=128, family=3) for i in range(4)]
    outcome = run(ClusterSettings(pool(engine())), *arrivals)
    assert [each.cached_tokens for each in outcome.requests] == [0, 128, 128, 128]
    figures = outcome.replicas["unified"][0].figures
    assert (figures.prompt_tokens, figures.hit_tokens) == (200 + 3 * 72, 3 * 128)


def test_tokens_from_disk_are_not_computed_and_delay_the_request():
    settings = ClusterSettings(
        pool(engine(stored_prompts=True, shards=2)), disk_seconds_per_token=0.001
    )
    (served,) = run(settings, Arrival(0.0, 200, 2, stored_tokens=128)).requests
    assert served.cached_tokens == 128
    assert served.ttft == pytest.approx(0.128 + 0.01 + 72 * 0.0001)


@pytest.mark.parametrize("shards", [1, 2])
def test_two_pools(shards):
    """The first token comes from the prefill pool. The decode pool prefills nothing."""
    decode = pool(engine(8, shards=shards, resumes=True, prefix_cache=False))
    settings = ClusterSettings(decode, pool(engine(), replicas=2), 0.0001)
    arrivals = [Arrival(0.002 * i, 90 + i, 5) for i in range(60)]
    outcome = run(settings, *arrivals, Arrival(1.0, 64, 1))
    assert sum(r.figures.prompt_tokens for r in outcome.replicas["decode"]) == 0
    assert sum(r.figures.output_tokens for r in outcome.replicas["prefill"]) == 61
    assert all(r.figures.prompt_tokens for r in outcome.replicas["prefill"])
    assert {each.output_tokens for each in outcome.requests} == {5, 1}
    first = min(outcome.requests, key=lambda each: each.submitted)
    travel = 91 * 0.0001
    assert first.end - first.first_token >= travel + 4 * 0.011


def test_prompts_from_disk_are_hits_on_every_shard():
    """Also when every shard is busy: what was read from disk is where the request runs."""
    settings = ClusterSettings(pool(engine(chunks=2, stored_prompts=True, shards=4)))
    arrivals = [Arrival(0.001 * i, 640, 2, stored_tokens=320) for i in range(200)]
    outcome = run(settings, *arrivals)
    figures = outcome.replicas["unified"][0].figures
    assert figures.hit_tokens / (200 * 320) > 0.95


def test_drafts_shorten_the_wait_between_tokens():
    served = [
        run(ClusterSettings(pool(engine(drafts=d, acceptance=0.8))), Arrival(0.0, 64, 601))
        for d in (0, 1)
    ]
    plain, drafted = (each.requests[0] for each in served)
    assert drafted.output_tokens == plain.output_tokens
    assert plain.tpot / drafted.tpot == pytest.approx(1.8, rel=0.05)


def test_figures_of_a_steady_load_follow_from_it():
    settings = ClusterSettings(pool(engine(), replicas=2))
    lengths = Lengths(200, 0.5, 1000), Lengths(20, 0.5, 100)
    arrivals = poisson(lambda now: 20.0, 20.0, 40.0, *lengths)
    figures = summary(
        Cluster(settings).run(arrivals, until=40.0, warm_up=10.0), ServiceLevel(1.0, 0.05)
    )
    assert figures["output_tokens_per_second"] == pytest.approx(400, rel=0.12)
    assert figures["prompt_tokens_per_second"] == pytest.approx(4000, rel=0.12)
    assert figures["nodes"] == 2
    assert figures["attainment"]["both"] > 0.99
    assert figures["limit"] == "requests seldom wait; steps are bound by arithmetic"
    running = figures["pools"]["unified"]["running_per_device"] * 16
    latency = (figures["ttft_ms"]["p50"] + 19 * figures["tpot_ms"]["p50"]) / 1e3
    assert running == pytest.approx(20 * latency, rel=0.3)  # Little's law


def test_overload_is_named():
    settings = ClusterSettings(pool(engine(4)))
    arrivals = poisson(lambda now: 40.0, 40.0, 20.0, Lengths(200, 0.5, 1000), Lengths(20, 0.5, 100))
    figures = summary(Cluster(settings).run(arrivals, until=20.0), ServiceLevel(0.5))
    assert (
        figures["limit"]
        == "unified: requests wait for request slots; steps are bound by arithmetic"
    )
    assert figures["attainment"]["ttft"] < 0.2
    assert figures["requests"] > figures["finished"] > 0
    assert not math.isnan(figures["tpot_ms"]["p99"])
