"""The least time of a step: each byte that it needs, read once at the bandwidth of the machine."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax.accounting import cache_bytes_per_token
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.plan.weights import parts, read_bytes

WINDOWS, RUNS = 5, 10


def step_bytes(model: DeepSeekV3, rows: int, cached: int) -> float:
    """Read by one decode step of ``rows`` rows behind ``cached`` tokens each, in a bfloat16 cache:
    the weights of the main model, of the experts those that are visited, and the cache. On several
    devices, by each of them.

    ``model`` may be of shapes. Of the embedding one row a token is read.
    """
    c, layout = model.config, model.layout
    own_rows = rows if layout is None else rows // layout.parts("batch")
    held = [part for part in parts(model, layout) if part.path[0] != "mtp"]
    E, chosen = c.n_routed_experts, c.num_experts_per_tok
    weights = read_bytes(held, rows=rows, own_rows=own_rows, chosen=chosen, places=E)
    return weights + own_rows * cached * cache_bytes_per_token(c)


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
