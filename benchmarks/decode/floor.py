"""The least time of a step: each byte that it needs, read once at the bandwidth of the machine."""

from __future__ import annotations

import functools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.accounting import cache_bytes_per_token
from dsv3_jax.layers.on_mesh import shardings
from dsv3_jax.model import DeepSeekV3

WINDOWS, RUNS = 5, 10


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """How many a batch visits on average, if every row chooses alike: E (1 - (1 - k / E)^B)."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def step_bytes(model: DeepSeekV3, rows: int, cached: int) -> float:
    """Read by one decode step of ``rows`` rows behind ``cached`` tokens each, in a bfloat16 cache:
    the weights of the main model, of the experts those that are visited, and the cache. On several
    devices, by each of them.

    ``model`` may be of shapes. Of the embedding one row a token is read.
    """
    c, layout = model.config, model.layout
    lies = {} if layout is None else shardings(model, layout)
    own_rows = rows if layout is None else rows // layout.parts("batch")
    visited = distinct_experts(c.n_routed_experts, c.num_experts_per_tok, rows)
    total = float(own_rows * cached * cache_bytes_per_token(c))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        own = leaf.shape if layout is None else lies[path].shard_shape(leaf.shape)
        size = math.prod(own) * jnp.dtype(leaf.dtype).itemsize
        if path[0] == "mtp":
            continue
        if path[0] == "embed_tokens":
            size = own_rows * leaf.shape[-1] * jnp.dtype(leaf.dtype).itemsize
        elif "experts" in path:
            size *= visited / c.n_routed_experts
        total += size
    return total


def bandwidth() -> float:
    """Bytes a second that a sum of 2 GiB reads, and on a CPU of 2 MiB."""
    words = 2**30 if jax.default_backend() == "gpu" else 2**20
    x = jax.random.normal(jax.random.key(0, impl="rbg"), (words,), jnp.bfloat16)
    add = jax.jit(functools.partial(jnp.sum, dtype=jnp.float32))
    return x.nbytes / seconds(lambda: add(x))


def memory_bytes() -> int:
    """Of the default device that JAX may use.

    Raises:
      ValueError: the device does not say.
    """
    statistics = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in statistics:
        raise ValueError(f"expected a device that says how much memory it has, got {jax.devices()}")
    return statistics["bytes_limit"]


def seconds(run: Any) -> float:
    """Of one run among many: the median of windows."""
    jax.block_until_ready(run())
    windows = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(RUNS)])
        windows.append((time.perf_counter() - began) / RUNS)
    return statistics.median(windows)
