"""token_exchange: the reference against numpy, and what is refused.

No interpreter knows the memory of other devices; ``python -m scripts.bench_exchange`` compares the
kernel with what must come before it times it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import token_exchange
from sharding import make_mesh


def exchanged(mesh, axes, rows, counts, implementation=None):
    """Of all devices, [devices * n, C, W] and [devices * n]."""
    run = jax.shard_map(
        functools.partial(token_exchange, axes=axes, implementation=implementation),
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(run)(rows, counts)


def inputs(devices, n, C=5, W=16):
    """[devices, n, C, W] and [devices, n]; some send nothing, some all."""
    rng = np.random.default_rng(n)
    rows = rng.integers(0, 2**16, (devices, n, C, W), np.uint16)
    counts = rng.integers(0, C + 1, (devices, n), np.int32)
    counts[0, 0], counts[-1, 0] = 0, C
    return rows, counts


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"expert": 8}, ("expert",)),
        ({"data": 2, "expert": 4}, ("data", "expert")),
        ({"data": 2, "expert": 2, "tensor": 2}, ("data", "expert")),
    ],
)
def test_what_arrives(sizes, axes):
    mesh = make_mesh(**sizes)
    devices, n = mesh.size, int(np.prod([sizes[axis] for axis in axes]))
    rows, counts = inputs(devices, n)
    got, came = exchanged(mesh, axes, rows.reshape(-1, 5, 16), counts.reshape(-1))
    got, came = np.asarray(got).reshape(rows.shape), np.asarray(came).reshape(counts.shape)
    apart = devices // n  # devices that exchange nothing, in the mesh between those that do
    for to in range(devices):
        for i in range(n):
            other = i * apart + to % apart
            sent = counts[other, to // apart]
            assert came[to, i] == sent
            np.testing.assert_array_equal(got[to, i, :sent], rows[other, to // apart, :sent])


def test_refused():
    mesh = make_mesh(expert=4, devices=jax.devices()[:4])
    rows, counts = jnp.zeros((12, 5, 16), jnp.uint16), jnp.zeros(12, jnp.int32)
    with pytest.raises(
        ValueError, match=r"for 4 devices along expert, got \(3, 5, 16\) and \(3,\)"
    ):
        exchanged(mesh, ("expert",), rows, counts)
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        exchanged(mesh, ("expert",), jnp.zeros((16, 5, 16)), jnp.zeros(16, jnp.int32), "mosaic_gpu")
