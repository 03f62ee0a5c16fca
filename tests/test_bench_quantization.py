"""scripts/bench_quantization.py, compared with float64 sums and small models."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import DeepSeekV3, ModelConfig, presets
from dsv3_jax.accounting import checkpoint_bytes
from dsv3_jax.quantization import INT4, INT8
from dsv3_jax.training.batches import held_out_batches
from scripts.bench_quantization import compare, sums, weight_bytes
from tests.support.checkpoints import tiny_config

BOS = 0


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("noise", "bound"), [(1e-3, 0.1), (1e-2, 1e-3), (0.3, 1e-5), (30.0, 1e-5)])
def test_sums(noise, bound):
    """Six of nine positions count: the last has no target, and two precede a BOS."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 500, (1, 9))
    tokens[0, [0, 3, 7]] = BOS
    logits = (4 * rng.standard_normal((1, 9, 500))).astype(np.float32)
    others = (logits + noise * rng.standard_normal(logits.shape)).astype(np.float32)
    log_p, log_q = log_softmax(logits), log_softmax(others)
    got = sums(jnp.float32(log_p), jnp.float32(log_q), jnp.asarray(tokens), BOS)
    at = [0, 1, 3, 4, 5, 7]
    p, q = log_p[0, at], log_q[0, at]
    want = (
        np.sum(np.exp(p) * (p - q)),
        np.sum(p.argmax(-1) == q.argmax(-1)),
        -np.sum(q[np.arange(6), tokens[0, 1:][at]]),
    )
    np.testing.assert_allclose(got, want, rtol=bound)
    same = sums(jnp.float32(log_p), jnp.float32(log_p), jnp.asarray(tokens), BOS)
    assert same[:2].tolist() == [0, 6]


@pytest.mark.slow
def test_compare():
    config = ModelConfig.from_hf(
        tiny_config(num_hidden_layers=1, num_nextn_predict_layers=0, initializer_range=0.1)
    )
    kinds = {"bf16": None, "int8": INT8, "int4": INT4}
    models = {
        form: DeepSeekV3(config, rngs=nnx.Rngs(0), quantization=kind)
        for form, kind in kinds.items()
    }
    tokens = np.random.default_rng(0).integers(0, 160, 100)
    result = compare(models, held_out_batches(tokens, 2, 20, BOS))
    assert result["bf16"]["kl"] == 0
    assert result["bf16"]["top1_agreement"] == 1
    assert 0 < 20 * result["int8"]["kl"] < result["int4"]["kl"] < 1
    assert result["int4"]["top1_agreement"] < result["int8"]["top1_agreement"] <= 1
    # Padding of the batch does not count.
    (whole,) = held_out_batches(tokens, 5, 20, BOS)
    for form, row in compare(models, [whole]).items():
        for name, mean in row.items():
            np.testing.assert_allclose(result[form][name], mean, rtol=1e-4)


def test_bytes():
    """DeepSeek-V3 without its MTP layer; the bfloat16 format has no scales."""
    v3 = presets.DEEPSEEK_V3
    fp8, bf16, int4 = (weight_bytes(v3, form) for form in ("fp8", "bf16", "int4"))
    assert bf16 == 2 * 671_026_419_200 + 58 * 256 * 2  # selection biases are float32
    assert int4 < 0.6 * fp8 < 0.6 * 0.51 * bf16 < checkpoint_bytes(v3)
