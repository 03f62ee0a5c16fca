"""Lower bounds on time, against arithmetic by hand and published speeds."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

from dsv3_jax import accounting, presets
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.network import Traffic, devices_reached, traffic
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ModelShapes
from tests.support import published_speeds
from tests.support.covering import slow_except

V3 = presets.DEEPSEEK_V3
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.fixture(scope="module")
def shapes():
    return ModelShapes.of(V3, "fp8", mtp=False, redundant_experts=0)


def plan_of(**changes):
    settings = {
        "config": V3, "target": Target.parse("gpu:h200x8"), "layout_name": "dp_attention_ep",
        "batch": 128, "context": 4096, "quantization": "fp8", "activations": "float8",
    }  # fmt: skip
    return Deployment(**(settings | changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    slow_except(["dp_attention_ep", "tensor_parallel", "tp_attention_ep"], quick=(1,)),
)
def test_flop_are_those_of_the_accounting(shapes, layout):
    """FLOP counted from the arrays, against the formula per token."""
    plan = plan_of(layout_name=layout)
    shard = shapes.shard(plan.layout)
    local_tokens = shard.local_batch(plan.batch)
    tokens = shard.expert_group_batch(plan.batch)
    flop = sum(shard.matmul_flop(tokens, local_tokens, decoding=True, float8=True))
    whole = plan.batch * accounting.flops_per_token(V3, 0, "decode").linear
    # Every device repeats the matmuls that are not sharded: latents and the router.
    assert whole <= 8 * flop < whole * (1.001 if layout == "dp_attention_ep" else 1.4)


def test_a_decode_step_by_hand(shapes):
    plan = plan_of()
    bound = roofline.decode(shapes.shard(plan.layout), plan)
    cached = 16 * 4096 * 61 * 1152
    assert bound.cache == pytest.approx(cached / 4.8e12)
    # Everything but the embedding and the 4.4 of 256 experts that no token chose; kv_b_proj is
    # read as bfloat16 up-projections.
    shard = shapes.shard(plan.layout)
    visited = accounting.distinct_experts(256, 8, 128) / 256
    assert visited == pytest.approx(251.6 / 256, rel=1e-3)
    experts = sum(p.nbytes for p in shard.parameters if "experts" in p.path)
    others = shard.weight_bytes - experts - 2 * 129_280 * 7168
    assert bound.weights == pytest.approx((others + visited * experts) / 4.8e12, rel=0.02)
    assert bound.binding == "weights"
    assert bound.seconds == bound.weights + bound.cache
    assert bound.tokens_per_s == 128 / bound.seconds


def test_a_tpu_reads_wider_pages(shapes):
    plan = plan_of(target=Target.parse("tpu:v5p:2x2x2"), activations=None)
    bound = roofline.decode(shapes.shard(plan.layout), plan)
    assert bound.cache == pytest.approx(16 * 4096 * 61 * 2 * 640 / 2765e9)


def test_devices_that_share_cached_tokens_read_their_part(shapes):
    plan = plan_of(layout_name="context_parallel", batch=2, context=100_000)
    whole = plan_of(layout_name="tp_attention_ep", batch=2, context=100_000)
    shard = shapes.shard(plan.layout)
    bound = roofline.decode(shard, plan)
    assert bound.cache == pytest.approx(2 * 100_000 * 61 * 1152 / 8 / 4.8e12)
    assert bound.cache == roofline.decode(shapes.shard(whole.layout), whole).cache / 8
    # In prefill too, nearly everything that a chunk of 512 tokens reads is divided.
    cached = (roofline.prefill(shapes.shard(p.layout), p).cache for p in (whole, plan))
    assert 6 < next(cached) / next(cached) < 8
    # The partial results are merged: 128 heads of 128 numbers and a log-sum-exp, and expert sums.
    merged = 61 * 4 * 128 * 129 + 58 * 4 * 7168 + 3 * 4 * 7168
    assert traffic(shard, plan, 2).within_node == pytest.approx(2 * 2 * 7 / 8 * merged)


@pytest.mark.slow
def test_bound_by_each(shapes):
    def binding(phase, **changes):
        plan = plan_of(**changes)
        return getattr(roofline, phase)(shapes.shard(plan.layout), plan).binding

    assert binding("decode", batch=8, context=100) == "weights"
    assert binding("decode", batch=512, context=65_536, layout_name="tensor_parallel") == "cache"
    assert binding("prefill", target=Target.parse("gpu:h800x16")) == "network"
    assert binding("prefill", exchange="ragged_all_to_all") == "arithmetic"


def test_a_draft_doubles_the_tokens_of_a_step():
    config = dataclasses.replace(V3, num_hidden_layers=4)
    shapes = ModelShapes.of(config, "fp8", mtp=True, redundant_experts=0)
    plan = plan_of(config=config, mtp=True)
    bound = roofline.decode(shapes.shard(plan.layout), plan)
    assert bound.tokens == 256
    assert bound.cache == pytest.approx(16 * 4096 * 5 * 1152 / 4.8e12)


def test_small_chunks_cost_more(shapes):
    shard = shapes.shard(plan_of().layout)
    whole, chunks = (roofline.prefill(shard, plan_of(prefill_chunk=chunk)) for chunk in (4096, 256))
    assert chunks.weights > 10 * whole.weights
    assert chunks.arithmetic > whole.arithmetic
    assert chunks.tokens == whole.tokens == 128 * 4096


def test_expanding_again_has_the_rate_of_the_activations(shapes):
    """Chunks expand the tokens before them again, in bfloat16 unless activations are float8."""
    shard = shapes.shard(plan_of().layout)

    def extra_seconds(activations):
        whole, chunks = (
            roofline.prefill(shard, plan_of(prefill_chunk=chunk, activations=activations))
            for chunk in (4096, 256)
        )
        return chunks.arithmetic - whole.arithmetic

    assert extra_seconds(None) == pytest.approx(2 * extra_seconds("float8"), rel=1e-3)


def test_traffic(shapes):
    inside = plan_of(float8_dispatch=True)
    token, result = 7168 + 224 + 64, 2 * 7168
    sent = traffic(shapes.shard(inside.layout), inside, 16, jnp.bfloat16)
    assert sent == Traffic(58 * 7 * 16 * (token + result))
    cut = plan_of(layout_name="tensor_parallel")
    sent = traffic(shapes.shard(cut.layout), cut, 128)
    assert sent == Traffic(2 * 61 * 2 * 7 / 8 * 128 * 4 * 7168)
    outside = dataclasses.replace(inside, target=Target.parse("gpu:h200x16"), batch=256)
    sent = traffic(shapes.shard(outside.layout), outside, 16, jnp.bfloat16)
    assert sent.between_nodes == pytest.approx(58 * 16 * (token + result))


def test_devices_reached():
    """A token chooses 4 of 8 groups and 8 experts: it reaches 4 of 8 devices, and almost 8 of
    many."""
    assert devices_reached(V3, 1) == 1
    assert devices_reached(V3, 4) == pytest.approx(4 * (1 - 15 / 70))
    assert devices_reached(V3, 8) == pytest.approx(4)
    assert 7.5 < devices_reached(V3, 144) < 8
    assert devices_reached(presets.MOONLIGHT_16B, 64) == pytest.approx(
        accounting.distinct_experts(64, 1, 6)
    )


@pytest.fixture(scope="module")
def bounds():
    return published_speeds.bounds()


@pytest.mark.slow
def test_no_bound_is_below_a_published_figure(bounds):
    for published, bound in zip(published_speeds.PUBLISHED, bounds, strict=True):
        assert bound.tokens_per_s_per_device >= published.tokens_per_s, published


@pytest.mark.slow
def test_the_page_has_the_table(bounds):
    text = PAGE.read_text("utf-8")
    begin, end = published_speeds.BEGIN, published_speeds.END
    assert text.partition(begin)[2].partition(end)[0].strip() == published_speeds.table(bounds)
