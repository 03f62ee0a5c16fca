"""One process of a run without a model: ``member.py ACTION ARGUMENT...``, under launch_local."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import make_mesh
from sharding.distributed import host_values, initialize


def gather() -> None:
    """Checks host_values on arrays that are replicated, sharded over processes, and local."""
    initialize(timeout_s=60)
    want = np.arange(8.0).reshape(4, 2)
    mesh = make_mesh(data=jax.device_count())
    for spec in (P("data"), P(None), P(None, None)):
        sharding = NamedSharding(mesh, spec)
        tree = {
            "sharded": jax.make_array_from_callback(
                want.shape, sharding, lambda index: want[index]
            ),
            "here": jnp.asarray(want),
            "host": want,
        }
        for value in host_values(tree).values():
            assert (value == want).all()
    print(f"process {jax.process_index()} of {jax.process_count()}: {jax.device_count()} devices")


def late(number: str, timeout_s: str) -> None:
    """Joins too late in the given process."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == number:
        time.sleep(100)
    initialize(timeout_s=int(timeout_s))


def dies(manner: str, others: str, peer_timeout_s: str) -> None:
    """Kills the last process or makes it raise, while the others compute with it or are idle."""
    initialize(timeout_s=60, peer_timeout_s=int(peer_timeout_s))
    mesh = make_mesh(data=jax.device_count())
    ones = np.ones(jax.device_count(), np.float32)
    sharded = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, P("data")), lambda index: ones[index]
    )
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
    assert float(total(sharded)) == jax.device_count()
    print("together")
    if jax.process_index() == jax.process_count() - 1:
        time.sleep(0.5)
        if manner == "raises":
            raise RuntimeError("planted")
        os.kill(os.getpid(), signal.SIGKILL)
    if others == "idle":
        time.sleep(100)
    while True:
        total(sharded).block_until_ready()


if __name__ == "__main__":
    actions = {f.__name__: f for f in (gather, late, dies)}
    actions[sys.argv[1]](*sys.argv[2:])
