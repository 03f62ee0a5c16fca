"""Compares training FLOPs with a count from the shapes of the published tensors."""

import dataclasses
import re

import jax
import pytest
from flax import nnx

from dsv3_jax import ModelConfig, presets
from dsv3_jax.checkpoint.tensor_table import tensor_table
from dsv3_jax.initialization import abstract_model
from dsv3_jax.training import lora
from dsv3_jax.training.metrics_log import peak_flops, training_flops_per_token, utilisation
from tests.support.checkpoints import tiny_config

TINY = ModelConfig.from_hf(tiny_config())


def active_elements(config: ModelConfig) -> float:
    """Returns the number of matrix elements that a token uses, with MTP layers and their heads."""
    active_fraction = config.num_experts_per_tok / config.n_routed_experts
    total = 0.0
    for name, spec in tensor_table(dataclasses.replace(config, quantization=None)).items():
        if len(spec.shape) == 2 and "embed_tokens" not in name:
            total += spec.shape[0] * spec.shape[1] * (active_fraction if ".experts." in name else 1)
    return total


@pytest.mark.parametrize("config", [TINY, presets.DEEPSEEK_V3], ids=["tiny", "V3"])
def test_flops_of_a_token(config):
    """Norms and biases count as active parameters of an MTP layer: less than 1%, and 0.01% in
    V3."""
    length = 48
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    width = config.qk_head_dim + config.v_head_dim
    attention = 2 * config.num_attention_heads * width * layers * length / 2
    want = 3 * (2 * active_elements(config) + attention)
    bound = 0.01 if config is TINY else 1e-4
    assert training_flops_per_token(config, length) == pytest.approx(want, rel=bound)


def test_without_mtp_layers():
    bare = dataclasses.replace(TINY, num_nextn_predict_layers=0)
    width = bare.qk_head_dim + bare.v_head_dim
    attention = 2 * bare.num_attention_heads * width * bare.num_hidden_layers * 24
    want = 3 * (2 * active_elements(bare) + attention)
    assert training_flops_per_token(bare, 48) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("config", [TINY, presets.get("moonlight-16b")], ids=["tiny", "Moonlight"])
def test_flops_of_low_rank_updates(config):
    """A frozen matrix is multiplied twice: the gradient by its input, which the first projections
    do not need, is the second time. An update's factors are multiplied three times."""
    rank, length = 4, 48
    model = abstract_model(config)
    updates = jax.eval_shape(lambda: lora.init(nnx.state(model, nnx.Param), rank, 0))
    shapes = {
        name: spec.shape
        for name, spec in tensor_table(dataclasses.replace(config, quantization=None)).items()
        if re.search(r"self_attn\.\w+proj|shared_experts", name)
    }
    assert len(shapes) == len(updates)
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    width = config.qk_head_dim + config.v_head_dim
    attention = 2 * config.num_attention_heads * width * layers * length / 2
    factors = 2 * rank * sum(map(sum, shapes.values()))
    inputs = [shapes[n] for n in shapes if re.fullmatch(FIRST, n)]
    assert len(inputs) == 2
    unneeded = 2 * sum(out * D + rank * D for out, D in inputs)
    want = 2 * 2 * active_elements(config) + 3 * attention + 3 * factors - unneeded
    got = training_flops_per_token(config, length, updates)
    assert got == pytest.approx(want, rel=0.01 if config is TINY else 1e-9)
    rate = 0.5 * 989.4e12 / got
    hopper = "NVIDIA H200", "bfloat16", updates
    assert utilisation(config, length, rate, *hopper) == pytest.approx(0.5)


FIRST = r"model\.layers\.0\.self_attn\.(q_proj|q_a_proj|kv_a_proj_with_mqa)\.weight"


def test_utilisation_by_hand():
    """The rate is half of the peak FLOP/s."""
    rate = 0.5 * 989.4e12 / training_flops_per_token(TINY, 64)
    assert utilisation(TINY, 64, rate, "NVIDIA H200", "bfloat16") == pytest.approx(0.5)
    assert utilisation(TINY, 64, rate, "NVIDIA H200", "float32") is None
    assert utilisation(TINY, 64, rate, "cpu", "bfloat16") is None


def test_devices_are_identified_by_prefix():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5p") == 459e12
    assert peak_flops("cpu") is None
