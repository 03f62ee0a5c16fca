"""The planner's memory use of a device, against checkpoints and measured peaks."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.decode import models
from dsv3_jax import accounting, presets
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, CacheSpec, LatentKVCache
from dsv3_jax.plan import memory, workspace
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.estimate import estimate
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ModelShapes
from pallas_kernels.top_k.threshold import CHUNK_BYTES
from sharding import make_layout

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = [
    *("decode_v3_h200_2", "decode_moonlight_fp8_h200", "decode_v3_many_h200", "decode_v3_mtp_h200"),
    *("decode_moonlight_h200_2", "prefill_v3_h200", "prefill_moonlight_h200"),
]


@pytest.fixture(scope="module")
def v3():
    return ModelShapes.of(presets.DEEPSEEK_V3, "fp8", mtp=True, redundant_experts=0)


def deployment(**changes):
    settings = {
        "config": presets.DEEPSEEK_V3, "target": Target.parse("gpu:h200x8"), "batch": 64,
        "layout_name": "dp_attention_ep", "context": 4096, "quantization": "fp8",
    }  # fmt: skip
    return Deployment(**(settings | changes))


@pytest.mark.slow
def test_weights_are_the_checkpoints(v3):
    """688,574,839,360 bytes are published; two tensors are copies that no model loads."""
    alone = deployment(target=Target.parse("gpu:h200x1"), layout_name="single")
    copies = 2 * 2 * 129_280 * 7168
    assert v3.shard(alone.layout).weight_bytes == 688_574_839_360 - copies
    assert v3.shard(alone.layout).weight_bytes == accounting.checkpoint_bytes(
        presets.DEEPSEEK_V3, mtp_copies=False
    )


@pytest.mark.slow
def test_data_parallel_attention_shards_only_the_experts(v3):
    alone = deployment(target=Target.parse("gpu:h200x1"), layout_name="single")
    whole, part = (v3.shard(each.layout).weight_bytes for each in (alone, deployment()))
    expert = 3 * 7168 * 2048 + 4 * 3 * 56 * 16
    assert whole - part == 59 * (256 - 32) * expert


def test_replicas():
    config = dataclasses.replace(presets.DEEPSEEK_V3, num_hidden_layers=5)
    shard = ModelShapes.of(config, "fp8", mtp=False, redundant_experts=32).shard(
        deployment(target=Target.parse("gpu:h800x144"), layout_name="deepseek_decode_ep144").layout
    )
    stacks = [p for p in shard.parameters if "experts" in p.path and p.path[-1] == "weight"]
    assert len(stacks) == 3 * 2
    assert {p.shape[0] for p in stacks} == {2}


def test_up_projections(v3):
    shard = v3.shard(deployment().layout)
    assert shard.up_projection_bytes == 2 * 62 * 128 * (128 + 128) * 512
    cut = v3.shard(deployment(layout_name="tensor_parallel").layout)
    assert cut.up_projection_bytes == shard.up_projection_bytes // 8


def test_the_cache_is_whole_pages(v3):
    shard = v3.shard(deployment().layout)
    use = memory.decode(shard, deployment(context=100))
    assert use.cache == 8 * 128 * 62 * 1152 - 8 * 128 * 1152  # without MTP drafts
    drafting = memory.decode(shard, deployment(context=100, mtp=True))
    assert drafting.cache == 8 * 192 * 62 * 1152  # a draft after two full pages


def test_devices_share_a_long_requests_cache():
    """The planner counts the pages that LatentKVCache allocates on a mesh of eight devices."""
    config = dataclasses.replace(presets.DEEPSEEK_V3, num_hidden_layers=1, first_k_dense_replace=0)
    shapes = ModelShapes.of(config, "bf16", mtp=False, redundant_experts=0)
    plan = deployment(
        config=config, quantization="bf16", layout_name="context_parallel", batch=2, context=5119
    )
    use = memory.decode(shapes.shard(plan.layout), plan)
    layout = make_layout("context_parallel", devices=jax.devices()[:8])
    spec = CacheSpec.of_config(config, jnp.bfloat16)
    cache = LatentKVCache.init(spec, 2, 5120, layout=layout, platform="gpu")
    (pages,) = jax.tree.leaves(cache.pool)
    assert use.cache == pages.addressable_shards[0].data.nbytes == pages.nbytes // 8
    whole = dataclasses.replace(plan, layout_name="tp_attention_ep")
    assert memory.decode(shapes.shard(whole.layout), whole).cache == 8 * use.cache


def test_gpus_without_our_kernels_store_quantized_weights_twice(v3):
    """XLA multiplies in bfloat16, whatever activations are rounded to, and computes all scores."""
    plan = deployment(target=Target.parse("b200x8"), activations="float8", batch=8)
    use = memory.decode(v3.shard(plan.layout), plan)
    on_hopper = dataclasses.replace(plan, target=Target.parse("h200x8"))
    assert memory.decode(v3.shard(on_hopper.layout), on_hopper).dequantized == 0
    stored = sum(p.elements for p in v3.shard(plan.layout).parameters if p.dtype.itemsize == 1)
    assert 2 * 0.98 * stored < use.dequantized < 2 * 1.02 * stored
    assert use.workspace > 128 * 4096 * 6


@pytest.mark.parametrize(
    ("exchange", "received"),
    [("all_gather", 512), ("all_to_all", None), ("ragged_all_to_all", 512), ("one_sided", 512)],
)
def test_buffers_of_an_exchange(v3, exchange, received):
    """The buffers that sharding.expert_parallel documents, for 64 tokens on each of 8 devices."""
    plan = deployment(batch=512, exchange=exchange)
    nbytes = memory.decode(v3.shard(plan.layout), plan).exchange
    if received is None:
        assert 0 < nbytes < memory.decode(v3.shard(deployment(batch=512).layout), plan).exchange * 2
        return
    token, sent = 2 * 7168 + 64, 64 if exchange == "all_gather" else 512
    assert nbytes == (received + sent) * token + received * 2 * 7168 + (received + sent) * 4 * 7168


def test_float8_tokens_are_half_as_long(v3):
    wide, narrow = (deployment(float8_dispatch=value) for value in (False, True))
    sizes = [workspace.token_bytes(v3.shard(plan.layout), plan.layout) for plan in (wide, narrow)]
    assert sizes == [2 * 7168 + 64, 7168 + 4 * 56 + 64]


@functools.cache
def on_one_gpu(model: str, dtype: str, mtp: bool):
    shapes = ModelShapes.of(models.SHAPES[model], dtype, mtp=mtp, redundant_experts=0)
    return shapes.shard(deployment(target=Target.parse("gpu:h200x1"), layout_name="single").layout)


def measured_state_bytes(plan: Deployment) -> int:
    """Returns the bytes of the state in the measured runs. They ran the Generator's own loop, which
    the engine's step has replaced on 2026-11-26, and whose state had other arrays."""
    S, K, D = plan.max_len, plan.draft_depth, plan.config.hidden_size
    num_mtp_inputs = K + 1 if plan.mtp else 0
    max_pages = -(-(S + K) // DEFAULT_PAGE_SIZE)
    of_a_sequence = 4 * (2 * S + 6 + max_pages + 2 * K) + 2 * num_mtp_inputs * D
    return plan.batch * of_a_sequence + 4


@pytest.mark.parametrize("name", MEASURED)
def test_measured_peaks(name):
    """Every row is within 5 % of what XLA took on an H200. The planner counts the LM head in
    prefill too, because it stays in memory, but the measured program did not take it as an
    argument."""
    rows = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["rows"]
    for row in rows:
        config, depth = models.SHAPES[row["model"]], row.get("depth", 0)
        decoding = row["phase"] == "decode"
        plan = Deployment(
            config=dataclasses.replace(config, max_position_embeddings=2**20),
            target=Target.parse("gpu:h200x1"),
            layout_name="single",
            batch=row["batch"],
            context=row["room"] if decoding else row["context"],
            quantization=row["dtype"],
            activations=row["activations"],
            mtp=bool(depth),
            prefill_chunk=row.get("chunk", 512),
        )
        shard = on_one_gpu(row["model"], row["dtype"], bool(depth))
        use = memory.decode(shard, plan) if decoding else memory.prefill(shard, plan)
        head = 0 if decoding else 2 * config.vocab_size * config.hidden_size
        assert use.peak - head == pytest.approx(row["peak_bytes"], rel=0.05), row
        arguments = row["peak_bytes"] - row["workspace_bytes"]
        counted = use.weights + use.cache + measured_state_bytes(plan) - head
        assert math.isclose(counted, arguments, rel_tol=1e-5), row


def test_many_bfloat16_tokens_with_quantized_experts():
    """They are dequantized for the kernel of bfloat16. The compiler reports 1.28 GB for 8,192
    tokens and four layers of Moonlight, in which it dequantizes one layer after the other. The
    planner allows for all of them, as in a loop, and for no ragged dot."""
    config = dataclasses.replace(presets.MOONLIGHT_16B, num_hidden_layers=4)
    plan = Deployment(
        config, Target.parse("gpu:h200x1"), "single", 16, 1024, "fp8", prefill_chunk=512
    )
    shapes = ModelShapes.of(config, "fp8", mtp=False, redundant_experts=0)
    shard = shapes.shard(plan.layout)
    use = memory.prefill(shard, plan)
    quantized = [p for p in shard.parameters if p.is_matrix and p.dtype.itemsize == 1]
    assert use.dequantized == sum(2 * p.elements for p in quantized)
    assert use.dequantized + use.workspace > 1.28e9
    rounded = dataclasses.replace(plan, activations="float8")
    assert memory.prefill(shard, rounded).dequantized == 0


def test_without_a_kernel_a_ragged_dot_pairs_each_token_with_each_matrix():
    config = dataclasses.replace(presets.MOONLIGHT_16B, num_hidden_layers=4)
    with_kernel, without = (
        Deployment(config, Target.parse(gpu), "single", 16, 1024, "fp8", prefill_chunk=512)
        for gpu in ("gpu:h200x1", "gpu:b200x1")
    )
    shapes = ModelShapes.of(config, "fp8", mtp=False, redundant_experts=0)
    copies, use = (
        memory.prefill(shapes.shard(plan.layout), plan).dequantized
        for plan in (with_kernel, without)
    )
    pairs, columns, experts = 8192 * 6, 2048, 64
    assert use - copies == 2 * experts * pairs * columns


@pytest.mark.parametrize(("width", "copies"), [(1408, False), (192, True)])
def test_int4_experts_of_many_float8_tokens_are_not_copied(width, copies):
    """If the kernel takes their width, a multiple of 128."""
    config = dataclasses.replace(
        presets.MOONLIGHT_16B, num_hidden_layers=2, moe_intermediate_size=width
    )
    target = Target.parse("gpu:h200x1")
    plan = Deployment(config, target, "single", 16, 1024, "int4", activations="float8")
    shard = ModelShapes.of(config, "int4", mtp=False, redundant_experts=0).shard(plan.layout)
    quantized = [p for p in shard.parameters if p.is_matrix and p.dtype == jnp.uint8]
    dense, experts = (
        sum(2 * p.elements for p in quantized if ("experts" in p.path) == is_routed)
        for is_routed in (False, True)
    )
    use = workspace.dequantized_bytes(shard, plan, 8192)
    assert use > dense + experts if copies else use == dense


@pytest.mark.parametrize(
    ("target", "arrays", "more"),
    [("tpu:v5p:2x2x1", 1, CHUNK_BYTES), ("gpu:h200x4", 1, 0), ("gpu:a100-80gbx4", 3, 0)],
)
@pytest.mark.parametrize(
    ("context", "scores"),
    [(2047, 0), (32_767, 4 * 512 * 32_768), (163_839, 2**28)],
)
def test_scores_of_an_indexer(target, arrays, more, context, scores):
    """They are in memory for some queries at a time. XLA sorts them where there is no kernel, but
    not on a TPU. test_tpu_compile_sparse.py asks the compiler."""
    config = dataclasses.replace(
        presets.get("deepseek-v3.2"), num_hidden_layers=1, first_k_dense_replace=1
    )
    plan = deployment(
        config=config, target=Target.parse(target), layout_name="dp_attention_ep", batch=4,
        context=context, prefill_chunk=512,
    )  # fmt: skip
    workspaces = []
    for each in (config, dataclasses.replace(config, index_topk=2**20)):  # more than all tokens
        shapes = ModelShapes.of(each, "fp8", mtp=False, redundant_experts=0)
        use = memory.prefill(shapes.shard(plan.layout), plan)
        workspaces.append(use.workspace + use.exchange)
    assert workspaces[0] - workspaces[1] == (arrays * scores + more if scores else 0)


def test_an_exchange_that_fits_is_proposed():
    """With all_gather every device of a group receives 32 chunks of 4,096 tokens; with all_to_all
    only the tokens of its own experts."""
    plan_of = {
        "config": dataclasses.replace(presets.DEEPSEEK_V3, num_hidden_layers=4),
        "target": Target.parse("tpu:v5e:16x16"),
        "layout_name": "tpu_pod",
        "batch": 32,
        "prefill_chunk": 4096,
    }
    with pytest.raises(ValueError, match=r"what fits: .*--exchange all_to_all"):
        estimate(deployment(**plan_of))
    assert estimate(deployment(**plan_of, exchange="all_to_all")).largest_batch >= 32
