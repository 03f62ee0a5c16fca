"""Mixtures of experts that are spread over devices: who computes what, and how tokens get there.

These functions run inside :func:`jax.shard_map`. Four exchanges give the same sums:

- ``all_gather``: every device sees every token, computes its own experts' share, and a
  reduce-scatter adds the shares. The only one with a gradient.
- ``all_to_all``: a token goes once to each device that holds one of its experts. Messages have a
  fixed capacity; what does not fit goes in a further round, so that nothing is ever dropped.
- ``ragged_all_to_all``: the same with messages of exact length, where the platform has it.
- ``one_sided``: the same, each device storing rows into the others' memory itself, by
  :func:`pallas_kernels.token_exchange`; among the devices of one process. Where that kernel cannot
  run, an all-to-all of all places takes its part.

Which one is used is said by the caller. With float32 partial sums (``combine_dtype``), no result
depends on it beyond the order in which they are added.

Of m tokens on each of n devices, a device sends m rows to all others and holds n m rows; or sends
``capacity`` rows to each and holds n times as many; or, of the last two, sends what must go, and
has room for n m. Beside them lie as many sums in float32, and what ``run`` makes of its pairs: K
for each row held, or ``pairs_at_once``.
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

from sharding.expert_mixture import Run, mix_local
from sharding.names import Exchange
from sharding.parcel import FLOAT8_BLOCK, Parcel
from sharding.token_exchange import gathered, in_rounds, one_sided, ragged, without_gradient
from sharding.token_queues import Queues

_LEAST_PAIRS = 16384  # of 7,168 columns in bfloat16, 235 MB


def check_exchange(
    mesh: Mesh | AbstractMesh,
    exchange: str,
    *,
    num_experts: int,
    axes: tuple[str, ...],
    reduce_axes: tuple[str, ...] = (),
    float8: bool = False,
    hidden_size: int | None = None,
    capacity: int | None = None,
    combine_dtype: DTypeLike = jnp.float32,
) -> int:
    """How many experts a device holds, if :func:`mix_experts` can do this on ``mesh``.

    Raises:
      ValueError: an unknown exchange, an axis that the mesh lacks or that is named twice, experts
        that do not divide over the devices, float8 rows that are no whole blocks, a capacity that
        is not positive or that the exchange does not use, another dtype of partial sums,
        ``one_sided`` on a mesh whose devices are not 0, 1, ... in row-major order.
      NotImplementedError: ``ragged_all_to_all`` on a CPU; ``one_sided`` with several processes.
    """
    if exchange not in get_args(Exchange):
        raise ValueError(
            f"exchange: expected one of {', '.join(get_args(Exchange))}; got {exchange!r}"
        )
    names = (*axes, *reduce_axes)
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
    if exchange == "ragged_all_to_all" and axes and platform_of(mesh) == "cpu":
        raise NotImplementedError(
            "ragged_all_to_all: XLA has none for CPUs; use all_to_all or all_gather there"
        )
    if exchange == "one_sided" and axes and jax.process_count() > 1:
        raise NotImplementedError(
            f"one_sided: expected devices of one process, got {jax.process_count()} processes"
        )
    if exchange == "one_sided" and axes and isinstance(mesh, Mesh):
        # A kernel names the device that it stores into by its place in the mesh. A mesh that is
        # being traced has no devices to ask.
        numbers = [device.id for device in mesh.devices.flat]
        if numbers != list(range(len(numbers))):
            raise ValueError(
                f"one_sided: expected devices 0 to {len(numbers) - 1} in row-major order, got"
                f" {numbers}"
            )
    return num_experts // devices


def platform_of(mesh: Mesh | AbstractMesh) -> str | None:
    """None: the mesh is of no devices yet."""
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    return device.platform if device else None


def default_capacity(tokens: int, experts_per_token: int, devices: int) -> int:
    """Tokens that one device sends another in one round, if every expert is as likely.

    A token has an expert on a device with ``p = 1 - (1 - 1 / devices)^K``. Room for a quarter more
    than expected, or for four standard deviations where that is more, so that a balanced load takes
    one round; never more than all tokens.
    """
    p = 1 - (1 - 1 / devices) ** experts_per_token
    expected, deviation = tokens * p, math.sqrt(tokens * p * (1 - p))
    return max(1, min(tokens, math.ceil(max(1.25 * expected, expected + 4 * deviation))))


def default_pairs(tokens: int, experts_per_token: int, devices: int) -> int:
    """(token, expert) pairs that one device computes at once: twice as many as come to it if every
    expert is as likely, and no fewer than take little memory, for a GPU would wait at the loop.

    Args:
      tokens: different ones, of all devices together.
      devices: over which the experts are spread.
    """
    return max(_LEAST_PAIRS, -(-2 * tokens * experts_per_token // devices))


def mix_experts(
    tokens: Float[Array, "M D"],
    experts: Int32[Array, "M K"],
    weights: Float32[Array, "M K"],
    run: Run,
    *,
    num_experts: int,
    axes: tuple[str, ...],
    exchange: Exchange,
    float8: bool = False,
    reduce_axes: tuple[str, ...] = (),
    capacity: int | None = None,
    pairs_at_once: int | None = None,
    combine_dtype: DTypeLike = jnp.float32,
) -> Float32[Array, "M D"]:
    """``y_m = sum_k weight_mk expert_mk(x_m)``, summed in float32, of experts on many devices.

    Runs inside shard_map. Device i, counted row-major along ``axes + reduce_axes``, holds experts
    ``i * E_local .. (i + 1) * E_local - 1``.

    Args:
      tokens: this device's own, as many on each; along ``reduce_axes`` all devices hold the same.
      experts: among all devices' ``num_experts``; a number outside is no expert (padding).
      run: the local experts' MLP, see :data:`~sharding.expert_mixture.Run`.
      axes: mesh axes that split the tokens. Without any, nothing is exchanged.
      float8: tokens travel in float8_e4m3fn, with a float32 scale for 128 columns, and are rounded
        to their own dtype again before ``run``; also where there is nothing to exchange. In
        gradients the rounding counts as the identity.
      reduce_axes: mesh axes along which every device adds its own experts' share, by one psum.
      capacity: tokens a device sends another in one round of ``all_to_all``; None:
        :func:`default_capacity`. When it is all tokens, one round is enough, and neither a loop
        nor an agreement on the rounds is compiled.
      pairs_at_once: (token, expert) pairs that ``run`` takes in one call, which bounds its memory.
        None: of ``all_gather`` as many as there may ever be, which alone has a gradient; of the
        others :func:`default_pairs`.
      combine_dtype: float32, or bfloat16, in which partial sums travel.

    Raises:
      ValueError, NotImplementedError: as :func:`check_exchange`, while tracing.
      ValueError: experts and weights that are not both [M, K], or ``pairs_at_once`` below 1.
      NotImplementedError: a gradient through another exchange than ``all_gather``.
    """
    (M, D), K = tokens.shape, experts.shape[-1]
    if experts.shape != (M, K) or weights.shape != (M, K):
        raise ValueError(
            f"experts, weights: expected both [{M}, K], got {experts.shape}, {weights.shape}"
        )
    if pairs_at_once is not None and pairs_at_once < 1:
        raise ValueError(f"pairs_at_once: expected None, or 1 or more; got {pairs_at_once}")
    mesh = jax.sharding.get_abstract_mesh()
    local_experts = check_exchange(
        mesh,
        exchange,
        num_experts=num_experts,
        axes=axes,
        reduce_axes=reduce_axes,
        float8=float8,
        hidden_size=D,
        capacity=capacity,
        combine_dtype=combine_dtype,
    )
    if pairs_at_once is None and axes and exchange != "all_gather":
        different = M * math.prod(mesh.shape[axis] for axis in axes)
        pairs_at_once = default_pairs(different, K, num_experts // local_experts)
    names = (*axes, *reduce_axes)
    first = local_experts * (lax.axis_index(names) if names else 0)

    def mix(tokens: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        own = mix_local(tokens, experts - first, weights, run, local_experts, pairs_at_once)
        return own.astype(combine_dtype) if names else own

    parcel = Parcel(D, K, tokens.dtype, float8)
    if exchange == "all_gather" or not axes:
        everyones: Any = gathered(parcel, axes, tokens, experts, weights)
        y = mix(*everyones)
        if axes:
            y = lax.psum_scatter(y, axes, scatter_dimension=0, tiled=True)
    else:
        tokens, weights = without_gradient(exchange, tokens, weights)
        # Behind the last token stands one with no expert, for places that no token takes.
        last = ((0, 1), (0, 0))
        rows = parcel.pack(
            jnp.pad(tokens, last),
            jnp.pad(experts, last, constant_values=num_experts),
            jnp.pad(weights, last),
        )
        devices = math.prod(mesh.shape[axis] for axis in axes)
        owner = jnp.where((experts >= 0) & (experts < num_experts), experts // local_experts, -1)
        if reduce_axes:
            # The other devices along reduce_axes send the same tokens to their own experts.
            row = math.prod(mesh.shape[axis] for axis in reduce_axes)
            owner = jnp.where(owner % row == lax.axis_index(reduce_axes), owner // row, -1)
        queues = Queues.of(jnp.where(owner < 0, devices, owner), devices)
        if exchange == "ragged_all_to_all":
            y = ragged(rows, queues, parcel, mix, axes)
        elif exchange == "one_sided":
            y = one_sided(rows, queues, parcel, mix, axes)
        else:
            capacity = capacity or default_capacity(M, K, num_experts // local_experts)
            y = in_rounds(rows, queues, parcel, mix, axes, min(capacity, M))
    return (lax.psum(y, reduce_axes) if reduce_axes else y).astype(jnp.float32)
