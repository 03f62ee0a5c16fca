"""The planner's memory use of an Engine, against the Engine's own arrays and cache size."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from dsv3_jax import presets
from dsv3_jax.engine.device import page_pool
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.generation.drafters import DraftPlan, MTPDrafter
from dsv3_jax.plan import capacity, engine_state, memory
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.estimate import estimate, model_shapes
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache

CONFIG = dataclasses.replace(
    presets.DEEPSEEK_V3, num_hidden_layers=2, first_k_dense_replace=1, vocab_size=4096
)


def plan(**changes) -> Deployment:
    settings = {
        "config": CONFIG, "target": Target.parse("gpu:h200x1"), "layout_name": "single",
        "batch": 16, "context": 1000, "prefill_chunk": 256, "engine": EngineSettings(),
    }  # fmt: skip
    return Deployment(**(settings | changes))


@pytest.fixture(scope="module")
def shards() -> ShardCache:
    return ShardCache()


def nbytes(leaves: list[jax.ShapeDtypeStruct]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_the_default_cache_is_the_engines(shards, monkeypatch):
    """A device that holds the weights and the up-projections of decode gets as many pages."""
    deployment = plan()
    shard = shards.of(deployment)
    stats = {
        "bytes_limit": deployment.target.chip.memory,
        "bytes_in_use": shard.weight_bytes + shard.up_projection_bytes,
    }
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(page_pool.jax, "local_devices", lambda: [device])
    model = shard.shapes.model
    pool = page_pool.PoolLayout.fitting(model, None, 16 * 1000, 64, mtp=False)
    pages = pool.pages_per_device
    assert engine_state.cache_tokens(shard, deployment) == 64 * pages
    use = memory.decode(shard, deployment)
    assert use.cache == pages * 64 * 2 * 576 * 2


@pytest.mark.parametrize("mtp", [False, True])
def test_slots_and_pages_are_the_engines_arrays(shards, mtp):
    deployment = plan(mtp=mtp, engine=EngineSettings(cache_tokens=6400))
    programs = Programs(
        model_shapes(deployment).model,
        Buckets((16,), (8,), 256, 1),
        DraftPlan(MTPDrafter() if mtp else None, (int(mtp),)),
        num_slots=16,
        max_len=1000,
        page_size=64,
        vocab_size=4096,
    )
    leaves, _ = programs.state_shapes(100)
    pages = [leaf for leaf in leaves if leaf.shape[:2] == (100, 64)]
    assert len(pages) == 2 + mtp
    use = memory.prefill(shards.of(deployment), deployment)
    assert use.cache == nbytes(pages)
    assert use.state == nbytes(leaves) - use.cache


def test_the_largest_cache_fits(shards):
    deployment = plan()
    result = estimate(deployment, shards)
    assert result.cache is not None
    assert result.cache.tokens < result.cache.largest
    for tokens, fits in ((result.cache.largest, True), (result.cache.largest + 64, False)):
        changed = plan(engine=EngineSettings(cache_tokens=tokens))
        assert capacity.fits(shards.of(changed), changed) is fits
    given = estimate(plan(engine=EngineSettings(cache_tokens=64_000)), shards)
    assert given.cache is not None
    assert given.cache.tokens == 64_000
    assert given.cache.largest == result.cache.largest


def test_a_step_holds_chunks_and_decodes(shards):
    """Both add tokens to the largest step; the Generator's prefill has chunks alone."""
    few = plan(engine=EngineSettings(cache_tokens=64_000, chunks=1))
    shard = shards.of(few)
    step = memory.prefill(shard, few)
    assert step.up_projections == shard.up_projection_bytes
    for changes in ({"batch": 512}, {"engine": EngineSettings(cache_tokens=64_000, chunks=8)}):
        larger = plan(**({"engine": few.engine} | changes))
        assert memory.prefill(shard, larger).workspace > step.workspace
    chunk_of_each = plan(batch=1, engine=None)
    alone = memory.prefill(shard, chunk_of_each)
    assert alone.up_projections == step.up_projections
    assert step.workspace - alone.workspace >= 15 * 3 * 2 * 7168


def test_a_cache_that_is_too_large(shards):
    """The refusal names the largest one that fits."""
    deployment = plan(engine=EngineSettings(cache_tokens=2**30))
    with pytest.raises(ValueError, match=r"largest part is latent cache.*--cache-tokens \d+"):
        estimate(deployment, shards)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="cache_tokens: expected at least a page, 64, got 63"):
        EngineSettings(cache_tokens=63)
    with pytest.raises(ValueError, match="chunks: expected 1 or more, got 0"):
        EngineSettings(chunks=0)
    most = CONFIG.max_position_embeddings
    assert plan(context=most).max_len == most
    with pytest.raises(ValueError, match=f"context: expected at most the model's {most} positions"):
        plan(context=most + 1)


def test_shards_have_their_own_part_of_the_cache(shards):
    """With data-parallel attention a device has the pages of its own requests, with context
    parallelism its part of every request's pages, with tensor parallelism all pages."""
    of_layout = {}
    for name in ("dp_attention_ep", "context_parallel", "tensor_parallel"):
        deployment = plan(
            target=Target.parse("h200x8"), layout_name=name, engine=EngineSettings(64 * 800)
        )
        shard = shards.of(deployment)
        of_layout[name] = memory.decode(shard, deployment).cache
        assert engine_state.cache_tokens(shard, deployment) == 64 * 800
    assert of_layout["tensor_parallel"] == 800 * 64 * 2 * 576 * 2
    assert of_layout["dp_attention_ep"] * 8 == of_layout["tensor_parallel"]
    assert of_layout["context_parallel"] == of_layout["dp_attention_ep"]
