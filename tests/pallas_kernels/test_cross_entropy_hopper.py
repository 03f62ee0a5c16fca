"""Cross-entropy with its gradient in the place of the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cross_entropy import mosaic_gpu, reference
from tests.pallas_kernels.machine import INTERPRET, kernel_runs

RANDOM = np.random.default_rng(0)
kernel = functools.partial(mosaic_gpu.cross_entropy, interpret=INTERPRET)


def case(M, W, scale=4.0):
    logits = jnp.asarray(RANDOM.normal(size=(M, W)) * scale, jnp.bfloat16)
    weights = jnp.asarray([0.0, *RANDOM.uniform(0.5, 2, M - 1)], jnp.float32)
    return logits, jnp.asarray(RANDOM.integers(0, W, M), jnp.int32), weights


def check(arguments):
    want, want_gradient = reference.cross_entropy(*arguments)
    nats, gradient = jax.jit(kernel)(*arguments)
    np.testing.assert_allclose(nats, want, rtol=1e-5, atol=1e-5)
    got, exact = (np.asarray(x, np.float32) for x in (gradient, want_gradient))
    np.testing.assert_allclose(got, exact, rtol=2**-7, atol=1e-9)


@kernel_runs
@pytest.mark.parametrize(
    ("rows", "columns"), [(5, 12 * 512), (3, 8 * 512), (2, 5 * 256)], ids=["uneven", "even", "256"]
)
def test_against_the_reference(rows, columns):
    check(case(rows, columns))


@kernel_runs
def test_targets_at_the_ends_of_chunks():
    logits, _, weights = case(6, 8 * 512)
    check((logits, jnp.array([0, 511, 512, 4095, 3584, 1], jnp.int32), weights))


@kernel_runs
@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_large_logits(offset):
    """exp would overflow, or be zero everywhere, without the maximum."""
    logits, targets, weights = case(3, 4 * 512)
    check((logits + jnp.bfloat16(offset), targets, weights))


def test_reference_is_the_gradient():
    logits, targets, weights = case(4, 256)
    logits = logits.astype(jnp.float32)

    def loss(logits):
        nats = reference.cross_entropy(logits, targets, weights)[0]
        return jnp.sum(nats * weights)

    gradient = reference.cross_entropy(logits, targets, weights)[1]
    np.testing.assert_allclose(gradient, jax.grad(loss)(logits), atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "refusal"),
    [
        (jnp.zeros((2, 256), jnp.float32), "takes bfloat16, got float32"),
        (jnp.zeros((2, 384), jnp.bfloat16), r"multiples of 256 columns .* \(2, 384\)"),
    ],
)
def test_refusals(logits, refusal):
    with pytest.raises(NotImplementedError, match=refusal):
        mosaic_gpu.cross_entropy(logits, jnp.zeros(2, jnp.int32), jnp.ones(2), interpret=object())


@pytest.mark.parametrize("columns", [4096, 129280, 163840])
def test_lowers_for_cuda(monkeypatch, columns):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    arguments = (
        jax.ShapeDtypeStruct((8, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.float32),
    )
    text = jax.jit(mosaic_gpu.cross_entropy).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert text.as_text().count("custom_call @mosaic_gpu") == 1
