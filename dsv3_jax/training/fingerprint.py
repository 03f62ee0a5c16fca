"""A fingerprint of a model's weights that does not depend on their sharding.

Every array is reduced to one number mod 2^64, in which its bit patterns are weighted by
pseudo-random odd factors, one per row and one per column:

    sum over i, j of row_factor[i] * column_factor[j] * bits[i, j]

The last dimension is the column j, and all others together are the row i. The sum is computed shard
by shard, so each process reads only its own shards. A change of a single value always changes the
fingerprint. Other accidental changes go unnoticed with a probability of about 2^-60. The
fingerprint does not protect against deliberate collisions.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Shaped, UInt64

from dsv3_jax.layers.router import RouterBias
from dsv3_jax.model import DeepSeekV3

_CHUNK = 1 << 19  # values that a thread converts to 64 bits at a time: 4 MiB
_MASK = (1 << 64) - 1


def fingerprint(model: DeepSeekV3) -> str:
    """Returns 32 hexadecimal digits that identify the names, shapes, dtypes and bits of all weights
    and router biases. The result is the same in every process and with every layout.

    It takes about one second per GB and core, and a few MiB of memory. On GPUs and TPUs it also
    needs a copy of one shard at a time, on the device and on the host. All processes of a run call
    this together.
    """
    arrays = {
        ".".join(map(str, path)): jnp.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.state(model, (nnx.Param, RouterBias)))
    }
    with ThreadPoolExecutor() as pool:
        local = [_local_sum(array, pool) for array in arrays.values()]
    sums = _sum_over_processes(np.array(local, np.uint64))
    lines = sorted(
        f"{name} {array.dtype} {array.shape} {total:016x}\n"
        for (name, array), total in zip(arrays.items(), sums, strict=True)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _local_sum(array: jax.Array, pool: ThreadPoolExecutor) -> int:
    """Returns the sum over the shards of this process. Replicas count once."""
    total = 0
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            # np.asarray of an array on an accelerator leaves a host copy cached in that array, so
            # it is applied to a temporary copy.
            block = np.asarray(shard.data if _on_host(shard.device) else jnp.copy(shard.data))
            total += _block_sum(block, array.shape, shard.index, pool)
    return total & _MASK


def _on_host(device: Any) -> bool:
    return device.platform == "cpu"


def _block_sum(
    block: Shaped[np.ndarray, ...],
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    pool: ThreadPoolExecutor,
) -> int:
    """Returns the weighted sum of ``block``, the part at ``index`` of an array with ``shape``."""
    if not block.size:
        return 0
    positions = [
        np.arange(size, dtype=np.uint64)[part] for size, part in zip(shape, index, strict=True)
    ]
    *leading, columns = positions or [np.zeros(1, np.uint64)]
    rows = np.zeros(1, np.uint64)
    for size, indices in zip(shape, leading, strict=False):
        rows = (rows[:, None] * np.uint64(size) + indices).reshape(-1)
    row_factors, column_factors = _factors(rows, 1), _factors(columns, 2)
    bits = np.dtype(f"u{block.dtype.itemsize}")
    values = block.reshape(len(rows), len(columns)).view(bits)
    step = max(_CHUNK // len(columns), 1)

    def chunk(start: int) -> int:
        row_sums = values[start : start + step].astype(np.uint64) @ column_factors
        return int(np.sum(row_sums * row_factors[start : start + step], dtype=np.uint64))

    return sum(pool.map(chunk, range(0, len(rows), step))) & _MASK


def _factors(positions: UInt64[np.ndarray, " N"], seed: int) -> UInt64[np.ndarray, " N"]:
    """Returns an odd factor for each position, by SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (positions + np.uint64(seed << 48)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31)) | np.uint64(1)


def _sum_over_processes(sums: UInt64[np.ndarray, " N"]) -> list[int]:
    """Adds the sums of all processes. They are gathered as 32-bit halves, because JAX has no 64-bit
    integers by default."""
    halves = sums.view(np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(halves))
    per_process = np.ascontiguousarray(gathered.reshape(-1, len(halves))).view(np.uint64)
    return np.add.reduce(per_process, axis=0).tolist()
