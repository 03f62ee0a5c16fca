"""mla_decode's back-ends, called through the public function."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_decode, mla_decode_schedule
from tests.pallas_kernels.mla_decode_cases import Inputs, MlaDecodeCases, run
from tests.pallas_kernels.numerics import central_difference, check_slope, device


class TestReference(MlaDecodeCases):
    implementation = "reference"

    def test_gradient_of_the_queries(self):
        """Compares with central differences of the float64 computation."""
        x = Inputs.random((20,), T=2, widths=self.widths)
        rng = np.random.default_rng(2)
        weights, direction = rng.standard_normal((2, *x.q_latent.shape))

        def loss(q_latent):
            out, _ = mla_decode(
                q_latent,
                device(x.q_rope, "float32"),
                device(x.pages, "float32"),
                jax.device_put(x.block_tables),
                device(x.lengths, "int32"),
                scale=x.scale,
                implementation="reference",
            )
            return jnp.sum(out * weights)

        def expected_loss(moved):
            out, _ = dataclasses.replace(x, q_latent=moved).expected()
            return np.sum(out * weights)

        gradient = jax.jit(jax.grad(loss))(device(x.q_latent, "float32"))
        slope = central_difference(expected_loss, x.q_latent, direction)
        check_slope(gradient, direction, slope)


class TestCpu(MlaDecodeCases):
    implementation = "cpu"

    def test_other_platforms_are_refused(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        x = Inputs.random((20,), widths=self.widths)
        with pytest.raises(NotImplementedError, match="cpu: runs on CPUs, this is gpu"):
            run(x, self.implementation)


@pytest.mark.parametrize(("platform", "chosen"), [("cpu", "cpu"), ("gpu", "reference")])
def test_default(monkeypatch, platform, chosen):
    """The default is bit for bit the platform's back-end."""
    x = Inputs.random((20, 33), T=2, widths=(24, 8), scale=0.2)
    want = run(x, chosen)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    got = jax.jit(functools.partial(mla_decode, scale=x.scale))(*x.arrays())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", [None, "reference", "cpu"])
def test_schedule_is_ignored(implementation):
    """Back-ends that use no schedule ignore it, bit for bit."""
    x = Inputs.random((20, 33), T=2, widths=(24, 8), scale=0.2)

    @jax.jit
    def scheduled(*arrays):
        schedule = mla_decode_schedule(arrays[4], queries=2, heads=2, max_pages=4)
        return mla_decode(*arrays, scale=x.scale, schedule=schedule, implementation=implementation)

    for a, b in zip(scheduled(*x.arrays()), run(x, implementation), strict=True):
        np.testing.assert_array_equal(a, b)
