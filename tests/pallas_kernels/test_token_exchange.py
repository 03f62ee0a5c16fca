"""token_exchange: compares the reference with NumPy, and tests the refusals.

No interpreter supports remote memory, so the kernel is not tested here.
``python -m scripts.bench_exchange`` checks its results on GPUs before it times it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import token_exchange
from sharding import make_mesh


def exchange(mesh, axes, rows, counts, implementation=None):
    """Returns what all devices received: [devices * n, C, W] and [devices * n]."""
    run = jax.shard_map(
        functools.partial(token_exchange, axes=axes, implementation=implementation),
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(run)(rows, counts)


def inputs(devices, n, C=5, W=16):
    """Returns rows [devices, n, C, W] and counts [devices, n], among which are 0 and C."""
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
def test_received_rows_and_counts(sizes, axes):
    mesh = make_mesh(**sizes)
    devices, n = mesh.size, int(np.prod([sizes[axis] for axis in axes]))
    rows, counts = inputs(devices, n)
    got, got_counts = exchange(mesh, axes, rows.reshape(-1, 5, 16), counts.reshape(-1))
    got, got_counts = (
        np.asarray(got).reshape(rows.shape),
        np.asarray(got_counts).reshape(counts.shape),
    )
    stride = devices // n  # stride between devices that exchange with each other
    for receiver in range(devices):
        for i in range(n):
            sender = i * stride + receiver % stride
            sent = counts[sender, receiver // stride]
            assert got_counts[receiver, i] == sent
            np.testing.assert_array_equal(
                got[receiver, i, :sent], rows[sender, receiver // stride, :sent]
            )


def test_refusals():
    mesh = make_mesh(expert=4, devices=jax.devices()[:4])
    rows, counts = jnp.zeros((12, 5, 16), jnp.uint16), jnp.zeros(12, jnp.int32)
    with pytest.raises(
        ValueError, match=r"for 4 devices along expert, got \(3, 5, 16\) and \(3,\)"
    ):
        exchange(mesh, ("expert",), rows, counts)
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        exchange(mesh, ("expert",), jnp.zeros((16, 5, 16)), jnp.zeros(16, jnp.int32), "mosaic_gpu")
