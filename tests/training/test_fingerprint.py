"""Tests of the fingerprint: equal for equal bits with any sharding, different after any change."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from dsv3_jax.training import fingerprint as module
from dsv3_jax.training.fingerprint import fingerprint
from sharding import make_mesh

VALUES = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


def local_sum(array: jax.Array) -> int:
    with ThreadPoolExecutor(2) as pool:
        return module._local_sum(array, pool)


@pytest.mark.parametrize(
    "spec",
    [(), ("data",), (None, "expert"), (None, None, ("data", "expert")), ("expert", "data")],
    ids=str,
)
def test_layouts_do_not_matter(spec):
    """The sum is the same on eight devices, with and without replicas."""
    mesh = make_mesh(data=2, expert=2, tensor=2)
    array = jax.device_put(VALUES, NamedSharding(mesh, PartitionSpec(*spec)))
    assert local_sum(array) == local_sum(jnp.asarray(VALUES))


def test_chunks_do_not_matter(monkeypatch):
    want = local_sum(jnp.asarray(VALUES))
    monkeypatch.setattr(module, "_CHUNK", 24)
    assert local_sum(jnp.asarray(VALUES)) == want


def test_devices_do_not_matter(monkeypatch):
    """On accelerators a shard is copied before it is read."""
    want = local_sum(jnp.asarray(VALUES))
    copies = []
    monkeypatch.setattr(module, "_on_host", lambda device: copies.append(device))
    assert local_sum(jnp.asarray(VALUES)) == want
    assert len(copies) == 1


def test_by_hand():
    """Compares the sum with its definition, in Python integers."""
    rows = module._factors(np.arange(2, dtype=np.uint64), 1).tolist()
    columns = module._factors(np.arange(3, dtype=np.uint64), 2).tolist()
    assert all(factor % 2 for factor in rows + columns)
    values = np.array([[1, 0, -2], [0.5, 3, 7]], np.float32)
    bits = values.view(np.uint32).tolist()
    want = sum(rows[i] * columns[j] * bits[i][j] for i in range(2) for j in range(3))
    assert local_sum(jnp.asarray(values)) == want % 2**64


def test_every_change_is_noticed():
    sums = {local_sum(jnp.asarray(VALUES))}
    for change in (
        lambda v: v.at[1, 2, 3].set(np.nextafter(v[1, 2, 3], np.float32(9))),
        lambda v: v.at[0, 0, 0].multiply(-1),
        lambda v: v[::-1],
        lambda v: v.at[0, jnp.array([1, 2])].set(v[0, jnp.array([2, 1])]),
        lambda v: v[..., ::-1],
        lambda v: v * 0,
        lambda v: v.astype(jnp.bfloat16),
    ):
        sums.add(local_sum(change(jnp.asarray(VALUES))))
    assert len(sums) == 8


def test_names_shapes_and_biases_count(model):
    """They count although the values themselves may be the same."""
    fingerprints = {fingerprint(model), fingerprint(nnx.clone(model))}
    assert len(fingerprints) == 1
    assert len(next(iter(fingerprints))) == 32
    attention = "self_attn"
    for change in ("bias", "shape", "dtype", "name"):
        other = nnx.clone(model)
        layer = other.layers[0]
        weight = getattr(layer, attention).o_proj.weight
        if change == "bias":
            bias = layer.mlp.gate.e_score_correction_bias
            bias.set_value(bias.get_value() + 1)
        elif change == "shape":
            weight.set_value(weight.get_value().reshape(1, *weight.get_value().shape))
        elif change == "dtype":  # zeros have the same bits in every dtype of this width
            weight.set_value(jnp.zeros_like(weight.get_value()))
            fingerprints.add(fingerprint(other))
            weight.set_value(weight.get_value().astype(jnp.bfloat16))
        else:
            norms = (layer.input_layernorm, layer.post_attention_layernorm)
            one, two = (norm.weight.get_value() for norm in norms)
            norms[0].weight.set_value(two)
            norms[1].weight.set_value(one)
        fingerprints.add(fingerprint(other))
    assert len(fingerprints) == 6


def test_sums_of_processes_are_added(monkeypatch):
    """Carries are included: sums have 64 bits, but processes exchange halves of 32 bits."""
    other = np.array([2**64 - 1, 5, 2**33], np.uint64)

    def gather(halves: np.ndarray) -> np.ndarray:
        return np.stack([halves, other.view(np.uint32)])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    assert module._sum_over_processes(np.array([3, 2**32 - 1, 2**33], np.uint64)) == [
        2,
        2**32 + 4,
        2**34,
    ]
