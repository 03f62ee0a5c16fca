"""The phases that bench_whole_layer computes from clocks."""

from types import SimpleNamespace

import numpy as np
import pytest

from pallas_kernels.whole_layer.plan import EVENTS
from scripts.bench_whole_layer import phases


def test_phases_of_clocks_that_wrap_around():
    """Two layers of four programs at 2 GHz, 5 us apart. Two programs have a part of attention."""
    stages, groups = SimpleNamespace(count=10), SimpleNamespace(groups=2)
    after = SimpleNamespace(events=("start", "latents", "out"), stages=stages)
    plan: object = SimpleNamespace(after=after, attention=groups)
    own = np.zeros((2, 4, len(EVENTS)), np.int64)
    own += 2**32 - 1500 + np.array([0, 1000, 2000, 2000, 3000])
    own[:, :2, 3:] += np.array([[400, 0], [600, 0]])[None]
    later = np.broadcast_to(own[..., -1:] + np.array([0, 1000, 3000]), (2, 4, 3))
    ns = 2**32 - 2000 + np.array([[0, 1500], [5000, 6500]])[:, None] + np.zeros((2, 4, 1), int)
    clocks = np.concatenate([later, ns], axis=-1)
    row = phases(plan, *(each.astype(np.uint32) for each in (own, clocks)), parts=1)  # pyright: ignore
    assert row["clock_mhz"] == 2000
    assert row["layer_us"] == 5
    assert row["kernel_us"] == 3
    assert (row["attention_us"], row["last_attention_us"]) == (0.25, 0.3)
    assert row["phases"] == {
        "inputs": 0.5,
        "barrier before attention": 0.5,
        "attention": pytest.approx(0.125, abs=0.01),
        "barrier after attention": pytest.approx(0.375, abs=0.01),
        "latents": 0.5,
        "out": 1.0,
    }
