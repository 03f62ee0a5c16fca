"""Step times of the model are the planner's bounds, and grow as the work does."""

from __future__ import annotations

import dataclasses

import pytest

from dsv3_jax import presets
from dsv3_jax.engine.scheduling.step_plan import Chunk, ShardPlan, StepPlan
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.efficiency import Efficiency
from dsv3_jax.simulator.step_times import StepModel
from dsv3_jax.simulator.step_work import StepWork
from dsv3_jax.simulator.workload import Arrival, SimulatedRequest

SHARDS = ShardCache()


def deployment(target: str, layout: str, batch: int, context: int) -> Deployment:
    return Deployment(
        presets.get("moonlight-16b"),
        Target.parse(target),
        layout,
        batch,
        context,
        exchange="all_to_all",
        engine=EngineSettings(),
    )


def decoding(requests: int, context: int, shards: int = 1) -> StepWork:
    """Work of equal requests on each of the shards."""
    keys = requests * context
    return StepWork(requests, requests, keys, keys, 0, 0, 0, 0, shards * requests)


@pytest.mark.parametrize(
    ("target", "layout", "shards"), [("h200", "single", 1), ("h800x16", "dp_attention_ep", 16)]
)
@pytest.mark.parametrize(("requests", "context"), [(1, 4096), (64, 1024), (256, 8192)])
def test_a_decode_step_takes_the_planners_bound(target, layout, shards, requests, context):
    d = deployment(target, layout, shards * requests, context)
    shard = SHARDS.of(d)
    bound = roofline.decode(shard, d)
    model = StepModel(shard, d)
    step = model.of(decoding(requests, context, shards), 3)
    assert step.seconds == pytest.approx(3 * bound.seconds, rel=1e-6)
    assert step.binding == bound.binding
    parts = model.parts(decoding(requests, context, shards))
    for name in ("weights", "cache", "arithmetic", "network"):
        assert parts[name] == pytest.approx(getattr(bound, name), rel=1e-6)


def test_a_prefill_takes_nearly_the_planners_bound():
    """The planner's prefill computes no logits; a step samples."""
    d = deployment("h200", "single", 1, 4096)
    d = dataclasses.replace(d, prefill_chunk=4096)
    bound = roofline.prefill(SHARDS.of(d), d)
    work = StepWork(0, 0, 0, 0, 1, 4096, 4096, 4096 * 4097 // 2, 4096)
    assert StepModel(SHARDS.of(d), d).of(work, 1).seconds == pytest.approx(bound.seconds, rel=0.2)


def test_shares_of_the_peaks_lengthen_a_step():
    d = deployment("h800x16", "dp_attention_ep", 16, 1024)
    shard, work = SHARDS.of(d), decoding(8, 1024, 16)
    bound = StepModel(shard, d).parts(work)
    reached = Efficiency(0.5, 0.25, 0.1, pass_seconds=0.02, hides_network=False)
    model = StepModel(shard, d, reached)
    memory = 2 * (bound["weights"] + bound["cache"])
    expected = max(memory, 4 * bound["arithmetic"]) + 10 * bound["network"] + 0.02
    assert model.of(work, 1).seconds == pytest.approx(expected)


def test_a_shared_prefix_comes_from_memory_once_and_from_the_cache_each_time():
    d = deployment("h100", "single", 64, 2048)
    model, chip = StepModel(SHARDS.of(d), d), d.target.chip
    work = decoding(64, 2048)
    alone = model.parts(work)["cache"]
    few = model.parts(dataclasses.replace(work, repeated_keys=2048))["cache"]
    assert few == pytest.approx(alone * 63 / 64), "bound by memory"
    all_but_one = model.parts(dataclasses.replace(work, repeated_keys=63 * 2048))["cache"]
    assert all_but_one == pytest.approx(alone * chip.memory_bandwidth / chip.l2_bandwidth)
    d = deployment("tpu:v5p:1x1x1", "single", 64, 2048)
    model = StepModel(SHARDS.of(d), d)
    parts = [model.parts(dataclasses.replace(work, repeated_keys=n))["cache"] for n in (0, 2048)]
    assert parts[0] == parts[1], "no such cache is known"


def test_repeated_keys_are_those_of_a_prefix_after_the_first_request():
    def request(number: int, family: int) -> SimulatedRequest:
        arrival = (
            Arrival(0.0, 100, 5, prefix=64, family=family) if family >= 0 else Arrival(0, 9, 5)
        )
        return SimulatedRequest.of(arrival, number)

    decodes = tuple(map(request, range(5), (0, 0, 1, -1, 0)))
    # The first one computes the prefix, the second one has it in its pages.
    chunks = (
        Chunk(request(5, 2), 5, 0, 64, True, False),
        Chunk(request(6, 1), 6, 64, 36, True, True),
    )
    shard = ShardPlan(decodes, tuple(range(5)), (0,) * 5, (0,) * 5, chunks)
    work = StepWork.of(StepPlan((shard,), 1))
    assert work.decode_keys == 4 * 100 + 9
    assert work.prompt_keys == 64 + 100
    assert work.repeated_keys == 2 * 64 + 64


@pytest.mark.parametrize("name", ["memory", "arithmetic", "network"])
def test_refused_shares(name):
    for value in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"{name}: expected a share above 0 and at most 1"):
            Efficiency(**{name: value})
