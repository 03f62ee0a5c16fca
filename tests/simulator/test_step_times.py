"""Step times of the model are the planner's bounds, and grow as the work does."""

from __future__ import annotations

import dataclasses

import pytest

from dsv3_jax import presets
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.shard_cache import ShardCache
from dsv3_jax.plan.target import Target
from dsv3_jax.simulator.efficiency import Efficiency
from dsv3_jax.simulator.step_times import StepModel
from dsv3_jax.simulator.step_work import StepWork

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


@pytest.mark.parametrize("name", ["memory", "arithmetic", "network"])
def test_refused_shares(name):
    for value in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"{name}: expected a share above 0 and at most 1"):
            Efficiency(**{name: value})
