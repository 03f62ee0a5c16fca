"""DeepSeek-V2 to int4: a plan for all of it, and single layers at their true size."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import load, presets
from dsv3_jax.accounting import checkpoint_bytes
from dsv3_jax.checkpoint.conversion_plan import plan_conversion
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.initialization import abstract_model
from dsv3_jax.quantization import INT4
from tests.support.sparse import entries, write_sparse_checkpoint

V2 = presets.DEEPSEEK_V2
GROUP = 128  # columns of an int4 row under one scale


@pytest.mark.slow
def test_the_whole_model(tmp_path):
    """55 sparse files of 8.6 GB, as published."""
    write_sparse_checkpoint(tmp_path / "source", V2.to_hf(), 55)
    planned = plan_conversion(tmp_path / "source", "int4")
    assert len(planned.source) == 29_102
    assert planned.source_bytes == checkpoint_bytes(V2) == 2 * 235_741_434_880
    int4 = dataclasses.replace(V2, quantization=INT4)
    # The last chunk of a tensor is padded.
    assert 1 <= planned.store_bytes / checkpoint_bytes(int4) < 1.0002
    assert planned.peak_bytes(1) < 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense_layers", "written"),
    [
        (1, ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
        (0, ("mlp.experts.0.gate_proj", "mlp.experts.31.down_proj")),
    ],
    ids=["dense", "32 experts"],
)
def test_one_layer(tmp_path, dense_layers, written):
    """All matrices have their true sizes. Two have values, and the rest are zero.

    The MoE layer has 32 of 160 experts: all of them take a minute.
    """
    config = dataclasses.replace(
        V2,
        num_hidden_layers=1,
        first_k_dense_replace=dense_layers,
        vocab_size=1024,
        n_routed_experts=32,
    )
    rng = np.random.default_rng(0)
    shapes = {name: shape for name, (_, shape) in entries(config.to_hf()).items()}
    values = {
        name: rng.standard_normal(shapes[name], np.float32).astype(ml_dtypes.bfloat16)
        for name in (f"model.layers.0.{each}.weight" for each in written)
    }
    write_sparse_checkpoint(tmp_path / "source", config.to_hf(), 3, values)
    convert(tmp_path / "source", tmp_path / "store", "int4")
    model, _ = load(tmp_path / "store", dtype=jnp.bfloat16, quantization="int4")
    state = nnx.to_flat_state(nnx.state(model))
    stored = {path: np.array(leaf.get_value()) for path, leaf in state}
    expected = abstract_model(config, dtype=jnp.bfloat16, quantization=INT4)
    assert {path: (x.shape, x.dtype) for path, x in stored.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in nnx.to_flat_state(nnx.state(expected))
    }
    for name, value in values.items():
        # A tensor's path is its name; experts are stacked.
        parts = name.removeprefix("model.").removesuffix(".weight").split(".")
        expert = int(parts.pop(4)) if "experts" in parts else slice(None)
        path = tuple(int(part) if part.isdecimal() else part for part in parts)
        packed, scale = (stored[*path, n][expert] for n in ("weight", "weight_scale"))
        halves = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int8)
        integers = np.where(halves < 8, halves, halves - 16).reshape(value.shape)
        steps = np.repeat(scale, GROUP, axis=1)[:, : value.shape[1]]
        assert np.all(np.abs(integers * steps - value.astype(np.float32)) <= 0.501 * steps)
        stored[*path, "weight"][expert] = 0
    assert not any(np.any(x) for path, x in stored.items() if path[-1] == "weight")
