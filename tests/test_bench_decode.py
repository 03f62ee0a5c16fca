"""scripts/bench_decode.py with a tiny model on a CPU; its floor; its random weights."""

import dataclasses
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import machine
from benchmarks.decode import floor, models, random_cache, steps
from benchmarks.decode.models import INT4_RMS, INT8_RMS
from dsv3_jax.accounting import distinct_experts
from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import CacheSpec, PagePool
from dsv3_jax.layers import paged_cache
from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.layers.moe import MoE
from pallas_kernels.sparse_index import scaled_pages
from scripts import bench_decode
from sharding import make_layout
from tests.support.checkpoints import tiny_config
from tests.support.covering import slow_except
from tests.support.running import forward


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(num_hidden_layers=1, first_k_dense_replace=0)))
    return path


really = steps.Compiled.__call__


def a_millisecond_a_step(self, state, buffers):
    """On a busy machine a tiny model's long dispatch may take less than its short one."""
    state, outputs, took = really(self, state, buffers)
    (steps, *_) = {int((np.asarray(output.counts) > 0).any(axis=1).sum()) for output in outputs}
    return state, outputs, 1e-3 * steps or took


def run(monkeypatch, config, *words):
    out = config.parent / "out.json"
    given = ["--model", str(config), "--dtype", "float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_decode", *given, *words])
    monkeypatch.setattr(steps, "WINDOWS", 2)
    monkeypatch.setattr(machine, "read_gbs", lambda gpu: 10.0)
    monkeypatch.setattr(steps.Compiled, "__call__", a_millisecond_a_step)
    bench_decode.main()
    return json.loads(out.read_text())


@pytest.mark.slow
def test_a_tiny_model(config, monkeypatch, capsys):
    words = "--batches 2 --contexts 70 --prefills 3x20 --chunk 24 --acceptances 1 --depth 1"
    words += " --chunk-forms expanded absorbed"
    result = run(monkeypatch, config, *words.split())
    assert result["read_gbs"] == 10
    plain, *prefills, drafted = result["rows"]
    assert plain["ms"] == drafted["ms"] == pytest.approx(1)
    for row in result["rows"]:
        assert row["ms"] > 0
        assert row["peak_bytes"] > 0
    assert plain["tokens_per_s"] == pytest.approx(2e3 / plain["ms"], rel=1e-3)
    assert plain["floor_fraction"] == pytest.approx(plain["floor_ms"] / plain["ms"], rel=1e-3)
    # All drafts are accepted: two tokens per sequence and step.
    assert drafted["tokens_per_s"] == pytest.approx(4e3 / drafted["ms"], rel=1e-3)
    assert [row["chunk_form"] for row in prefills] == ["expanded", "absorbed"]
    for row in prefills:
        assert row["chunk"] == 8
        assert row["tokens_per_s"] == pytest.approx(60e3 / row["ms"], rel=1e-3)
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == plain


@pytest.mark.slow
def test_a_model_without_mtp_layers_cannot_draft(config, monkeypatch):
    shape = json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}
    config.write_text(json.dumps(shape))
    with pytest.raises(SystemExit, match="--acceptances: expected a model with an MTP layer"):
        run(monkeypatch, config, "--batches", "1", "--acceptances", "0.7")


@pytest.mark.slow
def test_sparse_attention(config, monkeypatch):
    shape = json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}
    shape |= {"model_type": "deepseek_v32", "index_n_heads": 4, "index_head_dim": 32}
    config.write_text(json.dumps(shape | {"index_topk": 16}))
    words = "--batches 2 --contexts 10 70 --cache-dtype fp8_index"
    plain = run(monkeypatch, config, *words.split())["rows"]
    assert [row["context"] for row in plain] == [70, 10]
    for row in plain:
        assert row["cache_dtype"] == "fp8_index"
        assert row["ms"] == pytest.approx(1)
    assert plain[0]["floor_ms"] > plain[1]["floor_ms"]


@pytest.mark.parametrize("cache_dtype", [None, "fp8_index", "fp8"])
def test_random_caches_are_of_the_format_that_attention_reads(cache_dtype):
    config = ModelConfig.from_hf(
        tiny_config(num_hidden_layers=1, kv_lora_rank=128)
        | {"model_type": "deepseek_v32", "index_n_heads": 4, "index_head_dim": 32, "index_topk": 16}
    )
    spec = CacheSpec.of_config(config, jnp.bfloat16, mtp=True, cache_dtype=cache_dtype)
    pool = random_cache.fill(PagePool.empty(spec, 5, page_size=8), config)
    assert len(pool.layers) == len(pool.mtp) == 1
    for layer in (*pool.layers, *pool.mtp):
        latents = np.asarray(paged_cache.read_latents(config, layer["latent"], jnp.float32))
        keys, scales = layer["index_key"], jnp.ones((5, 8))
        if cache_dtype is not None:
            keys, scales = scaled_pages.split(keys, 32, 8)
        keys = np.asarray(keys, np.float32) * scales[..., None]
        for values in (latents, keys):
            assert values.shape[:2] == (5, 8)
            assert np.std(values) == pytest.approx(1, rel=0.1)
            assert abs(np.mean(values)) < 0.1
    assert not np.array_equal(pool.layers[0]["latent"], pool.mtp[0]["latent"])


@pytest.mark.slow
def test_a_failed_measurement_does_not_end_the_others(config, monkeypatch):
    class OutOfMemoryDecode:
        compiled = steps.Compiled(None, [], None, 1.0, 2, 3)
        longest = 5
        state = types.SimpleNamespace(lengths=[6, 6])

        def __init__(self, model, rows, *rest):
            if rows == 1:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

        def measure(self, cached):
            return {"ms": 2.0, "tokens_per_s": 1e3, "spread": 0.0}

    monkeypatch.setattr(steps, "Decode", OutOfMemoryDecode)
    rows = run(monkeypatch, config, "--batches", "1", "2", "--contexts", "5")["rows"]
    assert rows[0]["error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert (rows[1]["ms"], rows[1]["peak_bytes"]) == (2, 5)


@pytest.mark.slow
def test_time_budget(config, monkeypatch):
    words = ["--batches", "2", "--contexts", "5", "--time-budget", "0"]
    (row,) = run(monkeypatch, config, *words)["rows"]
    assert row["error"] == "the time budget is spent"


@pytest.mark.parametrize("text", ["8", "x8", "8x", "8x2x1"])
def test_shapes_of_prefills(text, capsys):
    with pytest.raises(SystemExit):
        bench_decode.parse(["--prefills", text])
    assert f"expected BATCHxTOKENS such as 8x2048, got '{text}'" in capsys.readouterr().err


@functools.cache
def abstract_model(name, weights):
    return models.shapes(models.SHAPES[name], weights, "bfloat16", mtp=False)


# Milliseconds at 4.35 TB/s, computed by hand from the published widths.
@pytest.mark.parametrize(
    ("name", "weights", "rows", "cached", "ms"),
    [
        ("moonlight-16b", "bf16", 1, 1024, 1.19),
        ("moonlight-16b", "bf16", 16, 1024, 5.93),
        ("moonlight-16b", "bf16", 128, 4096, 10.93),
        ("v3-slice", "fp8", 1, 1024, 1.64),
        ("v3-slice", "fp8", 64, 1024, 19.16),
        ("v3-slice", "fp8", 256, 4096, 24.21),
        # 14.4 MB of indexer more per layer; 2,048 latents and all index keys of 256 bytes.
        ("v32-slice", "fp8", 1, 131072, 1.60),
        ("v32-slice-dense", "fp8", 1, 131072, 1.78),
        ("v32-slice", "fp8", 64, 131072, 20.95),
        ("v32-slice-dense", "fp8", 64, 131072, 34.5),
        pytest.param("deepseek-v2", "int4", 1, 1024, 2.76, marks=pytest.mark.slow),
        pytest.param("deepseek-v2", "int4", 64, 1024, 27.6, marks=pytest.mark.slow),
    ],
)
def test_floor(name, weights, rows, cached, ms):
    model = abstract_model(name, weights)
    assert 1e3 * floor.step_bytes(model, rows, cached) / 4.35e12 == pytest.approx(ms, rel=0.02)


def test_distinct_experts():
    rng = np.random.default_rng(0)
    counts = [
        len({e for _ in range(16) for e in rng.choice(64, 6, replace=False)}) for _ in range(400)
    ]
    assert distinct_experts(64, 6, 16) == pytest.approx(np.mean(counts), rel=0.01)
    assert distinct_experts(64, 6, 1) == 6


@pytest.mark.slow
@pytest.mark.parametrize("weights", slow_except(list(models.WEIGHTS), quick=(2,)))
def test_matmuls_have_unit_variance(weights):
    config = dataclasses.replace(
        ModelConfig.from_hf(tiny_config(num_hidden_layers=2)),
        hidden_size=256,
        moe_intermediate_size=256,
    )
    layer = models.shapes(config, weights, "float32", mtp=False).layers[1]
    layer = models.random_model(layer)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, MoE)
    x = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    assert isinstance(attention.kv_a_proj_with_mqa, Linear)
    latents = nnx.jit(lambda linear, x: linear(x))(attention.kv_a_proj_with_mqa, x)
    assert np.var(latents) == pytest.approx(1, rel=0.2)
    for stack in (mlp.experts.gate_proj, mlp.experts.down_proj):
        assert isinstance(stack, Weight)
        dense = np.asarray(nnx.jit(lambda weight: weight.dense("float32"))(stack))
        np.testing.assert_allclose(np.var(x @ dense.swapaxes(1, 2), axis=(1, 2)), 1, rtol=0.2)
        assert not np.array_equal(dense[0], dense[1])


@pytest.mark.slow
@pytest.mark.parametrize("weights", list(models.WEIGHTS))
def test_logits_of_random_weights_are_finite(weights):
    config = ModelConfig.from_hf(tiny_config(num_hidden_layers=2))
    model = models.random_model(models.shapes(config, weights, "float32", mtp=True))
    logits, aux = forward(model, np.arange(12)[None])
    assert all(np.isfinite(array).all() for array in (logits, *aux.mtp_logits))


@pytest.mark.parametrize(("dtype", "rms"), [("int8", INT8_RMS), ("uint8", INT4_RMS)])
def test_integer_weights_have_mean_zero(dtype, rms):
    """With a nonzero mean, matrices share a direction, and all tokens go to the same experts."""
    stored = models._fill(jax.random.key(0), "integers", (2, 512, 512), jnp.dtype(dtype), 0.0)
    values = np.asarray(stored).astype(np.int32)
    if dtype == "uint8":
        halves = np.stack([values & 15, values >> 4])
        values = np.where(halves < 8, halves, halves - 16)
    assert np.sqrt(np.mean(values**2.0)) == pytest.approx(rms, rel=5e-3)
    assert abs(values.mean()) < 4 * rms / values.size**0.5


@pytest.mark.slow
def test_on_eight_devices(config, monkeypatch):
    words = "--batches 8 --contexts 70 --layers 2"
    layout = "--layout dp_attention_ep --exchange all_to_all one_sided"
    result = run(monkeypatch, config, *f"{words} {layout}".split())
    assert [row["exchange"] for row in result["rows"]] == ["all_to_all", "one_sided"]
    decode = result["rows"][0]
    assert decode["ms"] == pytest.approx(1)
    assert (decode["layout"], decode["devices"], decode["layers"]) == ("dp_attention_ep", 8, 2)


def test_bytes_per_device():
    config = models.SHAPES["v3-slice"]
    alone = abstract_model("v3-slice", "fp8")
    spread = models.shapes(config, "fp8", "bfloat16", mtp=False)
    devices = jax.devices()[:2]
    spread.lay_out(make_layout("dp_attention_ep", devices=devices))
    # 44 MB per expert; 256 tokens use all experts. Each device has half of them and of the cache.
    saved = floor.step_bytes(alone, 256, 4096) - floor.step_bytes(spread, 256, 4096)
    experts = 8 * 128 * 3 * 7168 * 2048
    cache = 9 * 128 * 4096 * 576 * 2
    assert saved == pytest.approx(experts + cache, rel=2e-3)
