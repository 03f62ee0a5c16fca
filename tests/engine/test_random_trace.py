"""Random requests: greedy tokens equal the Generator's, however the requests are served."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import dsv3_jax
from tests.engine.conftest import MAX_LEN
from tests.engine.random_trace import OPTIONS, Served, serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tiny_mtp) -> Served:
    return Served.of(tiny_mtp, 120, MAX_LEN)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_tiny_model(tiny, name):
    serve(tiny, count=120 if "three drafts" in name else 60, **OPTIONS[name])


def test_the_demo():
    model = dsv3_jax.load("demo", dtype=jnp.float32)[0]
    serve(Served.of(model, 10, 128), count=10, **OPTIONS["preemptions, MTP with three drafts"])
