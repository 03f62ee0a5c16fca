"""token_exchange: compares the reference with NumPy, and tests the refusals.

No interpreter supports remote memory: the kernel is tested on two GPUs or more only.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import token_exchange
from sharding import make_mesh
from tests.pallas_kernels.machine import on_gpus

EXCHANGES = 100
LATE = 20  # maximum delay of a device, in iterations of a loop


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


@on_gpus
@pytest.mark.parametrize(
    ("dtype", "C", "W"), [("uint8", 16, 7456), ("uint16", 64, 7168), ("uint16", 3, 1032)]
)
def test_the_kernel_with_late_devices(dtype, C, W):
    """Rows and counts change between exchanges. What a device sends is a function of the step, the
    sender and the receiver, so that only the kernel synchronises the devices."""
    mesh = make_mesh(expert=jax.device_count())
    n = mesh.size

    def sent(step, one, other):
        """Returns rows [n, C, W] and counts [n] from ``one`` to ``other``; one of these is [n]."""
        seed = step * 7919 + one * 131 + other * 31
        value = jnp.arange(C)[:, None] * 1009 + jnp.arange(W)
        return (seed[:, None, None] + value).astype(dtype), seed % (C + 1)

    def local():
        me, others = lax.axis_index("expert"), jnp.arange(n)

        def step(i, wrong):
            late = (me * 5 + i * 7) % LATE
            waited = lax.fori_loop(0, late, lambda _, v: v * 0.5 + 1, i.astype(jnp.float32))
            rows, counts = sent(i + (waited < 0), me, others)  # depends on the delay
            received, came = token_exchange(
                rows, counts, axes=("expert",), implementation="mosaic_gpu"
            )
            want, due = sent(i, others, me)
            there = jnp.arange(C) < due[:, None]
            return wrong + jnp.sum(there[..., None] & (received != want)) + jnp.sum(came != due)

        return lax.fori_loop(0, EXCHANGES, step, jnp.int32(0)).reshape(1)

    run = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P("expert"), check_vma=False)
    assert int(np.sum(jax.jit(run)())) == 0
