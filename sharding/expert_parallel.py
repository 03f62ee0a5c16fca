"""Expert parallelism: a mixture of experts that are sharded over devices.

These functions run inside :func:`jax.shard_map`. Four exchanges compute the same sums:

- ``all_gather``: every device receives every token and computes the partial sums of its own
  experts; a reduce-scatter adds them. The only exchange with a gradient.
- ``all_to_all``: each token is sent once to every device that holds one of its experts. Messages
  have a fixed capacity. Tokens that do not fit are sent in another round, so none is ever dropped.
- ``ragged_all_to_all``: the same with messages of exact length, on platforms that support it.
- ``one_sided``: the same; each device stores rows directly into the others' memory, with
  :func:`pallas_kernels.token_exchange`. All devices must belong to one process. Where that kernel
  cannot run, an all-to-all of full buffers replaces it.

The caller chooses the exchange: MoE layers use ``Layout.exchange``. With float32 partial sums
(``combine_dtype``), results depend on it only through the order of additions.

Memory and traffic, for m tokens on each of n devices:

==================== ================================ =======================
exchange             rows sent per device             rows in the buffers
==================== ================================ =======================
all_gather           m, to all others                 n m
all_to_all           ``capacity`` to each, per round  n ``capacity``
ragged, one_sided    only the tokens that must go     n m
==================== ================================ =======================

Each row of the buffers also needs a row of float32 partial sums. The experts' MLP needs
intermediate results for K (token, expert) pairs per row, or for ``pairs_per_call`` pairs in all.

:func:`mix_experts` prepares the rows; the collectives are in :mod:`sharding.token_exchange`.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from sharding.dispatch_table import DispatchTable
from sharding.expert_mixture import ExpertMLP, mix_local
from sharding.names import Exchange
from sharding.token_exchange import (
    exchange_one_sided,
    exchange_padded,
    exchange_ragged,
    gather_tokens,
    without_gradient,
)
from sharding.token_packer import FLOAT8_BLOCK, TokenPacker

_MIN_PAIRS_PER_CALL = 16384  # with 7,168 columns in bfloat16, 235 MB


def check_exchange(
    mesh: Mesh | AbstractMesh,
    exchange: str,
    *,
    num_experts: int,
    exchange_axes: tuple[str, ...],
    reduce_axes: tuple[str, ...] = (),
    float8: bool = False,
    hidden_size: int | None = None,
    capacity: int | None = None,
    combine_dtype: DTypeLike = jnp.float32,
) -> int:
    """Checks that :func:`mix_experts` can run with these arguments on ``mesh``.

    Returns:
      The number of experts per device.

    Raises:
      ValueError: the exchange is unknown; the mesh lacks an axis, or an axis is named twice; the
        experts do not divide over the devices; float8 rows are not whole blocks; the capacity is
        not positive, or the exchange has none; ``combine_dtype`` is neither float32 nor bfloat16;
        the devices for ``one_sided`` are not 0, 1, ... in row-major order.
      NotImplementedError: ``ragged_all_to_all`` on CPUs; ``one_sided`` with several processes.
    """
    if exchange not in get_args(Exchange):
        raise ValueError(
            f"exchange: expected one of {', '.join(get_args(Exchange))}; got {exchange!r}"
        )
    names = (*exchange_axes, *reduce_axes)
    for axis in names:
        if axis not in mesh.shape:
            raise ValueError(
                f"axes: expected mesh axes among {', '.join(mesh.shape)}; got {axis!r}"
            )
        if names.count(axis) > 1:
            raise ValueError(f"axes: expected each mesh axis once, got {axis!r} twice")
    devices = math.prod(mesh.shape[axis] for axis in names)
    if num_experts < 1 or num_experts % devices:
        raise ValueError(
            f"num_experts: expected a multiple of the {devices} devices along"
            f" {' x '.join(names) or 'no axis'}, got {num_experts}"
        )
    block = FLOAT8_BLOCK[1]
    if float8 and hidden_size is not None and hidden_size % block:
        raise ValueError(f"float8: expected rows in whole blocks of {block}, got {hidden_size}")
    if capacity is not None and (exchange != "all_to_all" or capacity < 1):
        raise ValueError(
            f"capacity: expected None, or 1 or more for all_to_all; got {capacity} for {exchange}"
        )
    if jnp.dtype(combine_dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(
            f"combine_dtype: expected float32 or bfloat16, got {jnp.dtype(combine_dtype)}"
        )
    check_platform(mesh, exchange, exchange_axes)
    if exchange == "one_sided" and exchange_axes and isinstance(mesh, Mesh):
        # The kernel addresses a device by its index in the mesh. The abstract mesh of a trace has
        # no devices to compare with.
        numbers = [device.id for device in mesh.devices.flat]
        if numbers != list(range(len(numbers))):
            raise ValueError(
                f"one_sided: expected devices 0 to {len(numbers) - 1} in row-major order, got"
                f" {numbers}"
            )
    return num_experts // devices


def check_platform(
    mesh: Mesh | AbstractMesh, exchange: str, exchange_axes: tuple[str, ...]
) -> None:
    """Checks that the platform of ``mesh`` has an exchange, whatever the model is.

    Raises:
      NotImplementedError: ``ragged_all_to_all`` on CPUs; ``one_sided`` with several processes.
    """
    if exchange == "ragged_all_to_all" and exchange_axes and mesh_platform(mesh) == "cpu":
        raise NotImplementedError(
            "ragged_all_to_all: XLA does not implement it on CPUs; use all_to_all or all_gather"
        )
    if exchange == "one_sided" and exchange_axes and jax.process_count() > 1:
        raise NotImplementedError(
            f"one_sided: expected devices of one process, got {jax.process_count()} processes"
        )


def mesh_platform(mesh: Mesh | AbstractMesh) -> str | None:
    """Returns the platform of a mesh's devices, such as "gpu", or None for an abstract mesh."""
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    return device.platform if device else None


def default_capacity(tokens: int, experts_per_token: int, devices: int) -> int:
    """Returns the number of rows in one message of ``all_to_all``, for equally likely experts.

    A token has an expert on a given device with probability ``p = 1 - (1 - 1 / devices)^K``. The
    capacity exceeds the expected number of tokens by a quarter or by four standard deviations,
    whichever is more, so that a balanced load takes one round. It never exceeds ``tokens``.

    Args:
      tokens: number of tokens on the sending device.
    """
    p = 1 - (1 - 1 / devices) ** experts_per_token
    expected, deviation = tokens * p, math.sqrt(tokens * p * (1 - p))
    return max(1, min(tokens, math.ceil(max(1.25 * expected, expected + 4 * deviation))))


def default_pairs_per_call(tokens: int, experts_per_token: int, devices: int) -> int:
    """Returns the number of (token, expert) pairs that one device computes in one call.

    It is twice the number of pairs that a device receives if experts are equally likely. It has a
    lower limit, because small calls save little memory and a GPU waits at every loop iteration.

    Args:
      tokens: number of different tokens on all devices together.
      devices: number of devices that the experts are sharded over.
    """
    return max(_MIN_PAIRS_PER_CALL, -(-2 * tokens * experts_per_token // devices))


def mix_experts(
    tokens: Float[Array, "M D"],
    experts: Int32[Array, "M K"],
    weights: Float32[Array, "M K"],
    expert_mlp: ExpertMLP,
    *,
    num_experts: int,
    exchange_axes: tuple[str, ...],
    exchange: Exchange,
    float8: bool = False,
    reduce_axes: tuple[str, ...] = (),
    capacity: int | None = None,
    pairs_per_call: int | None = None,
    combine_dtype: DTypeLike = jnp.float32,
) -> Float32[Array, "M D"]:
    """Computes ``y_m = sum_k weight_mk expert_mk(x_m)`` in float32, with experts on many devices.

    Runs inside shard_map. Device i, counted row-major along ``exchange_axes + reduce_axes``, holds
    experts ``i * E_local .. (i + 1) * E_local - 1``.

    Args:
      tokens: this device's tokens; M is the same on all devices. Along ``reduce_axes`` all devices
        have equal tokens.
      experts: global expert numbers. A number outside 0 .. num_experts - 1 is padding and adds
        nothing.
      expert_mlp: MLP of the local experts, see :data:`~sharding.expert_mixture.ExpertMLP`.
      exchange_axes: mesh axes that shard both tokens and experts. If empty, no token is exchanged.
      float8: whether tokens are sent in float8_e4m3fn, with a float32 scale per 128 columns.
        ``expert_mlp`` gets them in their own dtype again. They are rounded even if nothing is
        exchanged. Gradients treat the rounding as the identity.
      reduce_axes: mesh axes that shard experts only. One psum adds the partial sums along them.
      capacity: rows in one message of ``all_to_all``; None takes :func:`default_capacity`. With
        ``capacity >= M`` one round suffices, and neither a loop nor the collective that agrees on
        the number of rounds is compiled.
      pairs_per_call: largest number of (token, expert) pairs in one call of ``expert_mlp``, which
        bounds its memory. None takes all possible pairs for ``all_gather``, which only then has a
        gradient, and :func:`default_pairs_per_call` for the other exchanges.
      combine_dtype: dtype in which partial sums are sent, float32 or bfloat16.

    Raises:
      ValueError, NotImplementedError: as :func:`check_exchange`, while tracing.
      ValueError: experts and weights are not both [M, K], or ``pairs_per_call`` is below 1.
      NotImplementedError: a gradient is taken through another exchange than ``all_gather``.
    """
    (M, D), K = tokens.shape, experts.shape[-1]
    if experts.shape != (M, K) or weights.shape != (M, K):
        raise ValueError(
            f"experts, weights: expected both [{M}, K], got {experts.shape}, {weights.shape}"
        )
    if pairs_per_call is not None and pairs_per_call < 1:
        raise ValueError(f"pairs_per_call: expected None, or 1 or more; got {pairs_per_call}")
    mesh = jax.sharding.get_abstract_mesh()
    local_experts = check_exchange(
        mesh,
        exchange,
        num_experts=num_experts,
        exchange_axes=exchange_axes,
        reduce_axes=reduce_axes,
        float8=float8,
        hidden_size=D,
        capacity=capacity,
        combine_dtype=combine_dtype,
    )
    if pairs_per_call is None and exchange_axes and exchange != "all_gather":
        different = M * math.prod(mesh.shape[axis] for axis in exchange_axes)
        pairs_per_call = default_pairs_per_call(different, K, num_experts // local_experts)
    names = (*exchange_axes, *reduce_axes)
    first_expert = local_experts * (lax.axis_index(names) if names else 0)

    def mix(tokens: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        partial_sums = mix_local(
            tokens, experts - first_expert, weights, expert_mlp, local_experts, pairs_per_call
        )
        return partial_sums.astype(combine_dtype) if names else partial_sums

    packer = TokenPacker(D, K, tokens.dtype, float8)
    if exchange == "all_gather" or not exchange_axes:
        gathered: Any = gather_tokens(packer, exchange_axes, tokens, experts, weights)
        y = mix(*gathered)
        if exchange_axes:
            y = lax.psum_scatter(y, exchange_axes, scatter_dimension=0, tiled=True)
    else:
        tokens, weights = without_gradient(exchange, tokens, weights)
        # One token without experts is appended. It fills slots that no token takes.
        one_more = ((0, 1), (0, 0))
        rows = packer.pack(
            jnp.pad(tokens, one_more),
            jnp.pad(experts, one_more, constant_values=num_experts),
            jnp.pad(weights, one_more),
        )
        devices = math.prod(mesh.shape[axis] for axis in exchange_axes)
        owner = jnp.where((experts >= 0) & (experts < num_experts), experts // local_experts, -1)
        if reduce_axes:
            # Each device along reduce_axes sends the same tokens, but only to experts with its own
            # index along these axes.
            copies = math.prod(mesh.shape[axis] for axis in reduce_axes)
            is_own = owner % copies == lax.axis_index(reduce_axes)
            owner = jnp.where(is_own, owner // copies, -1)
        table = DispatchTable.from_owners(jnp.where(owner < 0, devices, owner), devices)
        if exchange == "ragged_all_to_all":
            y = exchange_ragged(rows, table, packer, mix, exchange_axes)
        elif exchange == "one_sided":
            y = exchange_one_sided(rows, table, packer, mix, exchange_axes)
        else:
            capacity = capacity or default_capacity(M, K, num_experts // local_experts)
            y = exchange_padded(rows, table, packer, mix, exchange_axes, min(capacity, M))
    return (lax.psum(y, reduce_axes) if reduce_axes else y).astype(jnp.float32)
