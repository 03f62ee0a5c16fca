"""Bounds on time, against hand arithmetic and what others have published."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

from dsv3_jax import accounting, presets
from dsv3_jax.plan import roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.network import Sent, devices_reached, sent
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import Shapes
from scripts import plan_published
from tests.support.covering import slow_except

V3 = presets.DEEPSEEK_V3
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.fixture(scope="module")
def shapes():
    return Shapes.of(V3, "fp8", mtp=False, redundant_experts=0)


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
def test_operations_are_those_of_the_accounting(shapes, layout):
    """Read off the arrays, against the formula of a token's."""
    plan = plan_of(layout_name=layout)
    share = shapes.on(plan.layout)
    rows = share.own_rows(plan.batch)
    together = share.rows_together(plan.batch)
    wide, narrow = share.operations(together, rows, decoding=True, float8=True)
    whole = plan.batch * accounting.flops_per_token(V3, 0, "decode").linear
    # What is not cut is done by every device: latents and the router.
    assert whole <= 8 * (wide + narrow) < whole * (1.001 if layout == "dp_attention_ep" else 1.4)


def test_a_decode_step_by_hand(shapes):
    plan = plan_of()
    found = roofline.decode(shapes.on(plan.layout), plan)
    cached = 16 * 4096 * 61 * 1152
    assert found.cache == pytest.approx(cached / 4.8e12)
    # All but the 251.6 of 256 experts' rest, embedding; kv_b_proj in bfloat16.
    share = shapes.on(plan.layout)
    visited = accounting.distinct_experts(256, 8, 128) / 256
    assert visited == pytest.approx(251.6 / 256, rel=1e-3)
    experts = sum(p.nbytes for p in share.parts if "experts" in p.path)
    others = share.weights - experts - 2 * 129_280 * 7168
    assert found.weights == pytest.approx((others + visited * experts) / 4.8e12, rel=0.02)
    assert found.binding == "weights"
    assert found.seconds == found.weights + found.cache
    assert found.tokens_per_s == 128 / found.seconds


def test_a_tpu_reads_wider_pages(shapes):
    plan = plan_of(target=Target.parse("tpu:v5p:2x2x2"), activations=None)
    found = roofline.decode(shapes.on(plan.layout), plan)
    assert found.cache == pytest.approx(16 * 4096 * 61 * 2 * 640 / 2765e9)


def test_devices_that_share_cached_tokens_read_their_part(shapes):
    plan = plan_of(layout_name="context_parallel", batch=2, context=100_000)
    whole = plan_of(layout_name="tp_attention_ep", batch=2, context=100_000)
    share = shapes.on(plan.layout)
    found = roofline.decode(share, plan)
    assert found.cache == pytest.approx(2 * 100_000 * 61 * 1152 / 8 / 4.8e12)
    assert found.cache == roofline.decode(shapes.on(whole.layout), whole).cache / 8
    # Of a prompt, chunks of 512 before the last: nearly all of what is read is shared.
    cached = (roofline.prefill(shapes.on(p.layout), p).cache for p in (whole, plan))
    assert 6 < next(cached) / next(cached) < 8
    # The parts are merged: 128 heads of 128 numbers and a log-sum-exp, and the experts' sums.
    merged = 61 * 4 * 128 * 129 + 58 * 4 * 7168 + 3 * 4 * 7168
    assert sent(share, plan, 2).link == pytest.approx(2 * 2 * 7 / 8 * merged)


@pytest.mark.slow
def test_bound_by_each(shapes):
    def binding(phase, **changes):
        plan = plan_of(**changes)
        return getattr(roofline, phase)(shapes.on(plan.layout), plan).binding

    assert binding("decode", batch=8, context=100) == "weights"
    assert binding("decode", batch=512, context=65_536, layout_name="tensor_parallel") == "cache"
    assert binding("prefill", target=Target.parse("gpu:h800x16")) == "network"
    assert binding("prefill", exchange="ragged_all_to_all") == "arithmetic"


def test_drafts_double_what_is_checked():
    config = dataclasses.replace(V3, num_hidden_layers=4)
    shapes = Shapes.of(config, "fp8", mtp=True, redundant_experts=0)
    plan = plan_of(config=config, mtp=True)
    found = roofline.decode(shapes.on(plan.layout), plan)
    assert found.tokens == 256
    assert found.cache == pytest.approx(16 * 4096 * 5 * 1152 / 4.8e12)


def test_small_chunks_cost_more(shapes):
    share = shapes.on(plan_of().layout)
    whole, pieces = (roofline.prefill(share, plan_of(prefill_chunk=chunk)) for chunk in (4096, 256))
    assert pieces.weights > 10 * whole.weights
    assert pieces.arithmetic > whole.arithmetic
    assert pieces.tokens == whole.tokens == 128 * 4096


def test_what_is_sent(shapes):
    inside = plan_of(float8_dispatch=True)
    row, back = 7168 + 224 + 64, 2 * 7168
    found = sent(shapes.on(inside.layout), inside, 16, jnp.bfloat16)
    assert found == Sent(58 * 7 * 16 * (row + back))
    cut = plan_of(layout_name="tensor_parallel")
    found = sent(shapes.on(cut.layout), cut, 128)
    assert found == Sent(2 * 61 * 2 * 7 / 8 * 128 * 4 * 7168)
    outside = dataclasses.replace(inside, target=Target.parse("gpu:h200x16"), batch=256)
    found = sent(shapes.on(outside.layout), outside, 16, jnp.bfloat16)
    assert found.between_nodes == pytest.approx(58 * 16 * (row + back))


def test_devices_reached():
    """Four groups of eight: all nodes of two, most of four, eight tokens' places of many."""
    assert devices_reached(V3, 1) == 1
    assert devices_reached(V3, 4) == pytest.approx(4 * (1 - 15 / 70))
    assert devices_reached(V3, 8) == pytest.approx(4)
    assert 7.5 < devices_reached(V3, 144) < 8
    assert devices_reached(presets.MOONLIGHT_16B, 64) == pytest.approx(
        accounting.distinct_experts(64, 1, 6)
    )


@pytest.fixture(scope="module")
def bounds():
    return plan_published.bounds()


@pytest.mark.slow
def test_no_bound_is_below_a_published_figure(bounds):
    for published, bound in zip(plan_published.PUBLISHED, bounds, strict=True):
        assert bound.tokens_per_s_per_device >= published.tokens_per_s, published


@pytest.mark.slow
def test_the_page_has_the_table(bounds):
    text = PAGE.read_text("utf-8")
    begin, end = plan_published.BEGIN, plan_published.END
    assert text.partition(begin)[2].partition(end)[0].strip() == plan_published.table(bounds)
