"""Layout: a mesh, the rules that shard a model over it, and the exchange of tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sharding.expert_parallel import mesh_platform
from sharding.names import Exchange
from sharding.rules import DEFAULT_RULES, Rules

LogicalAxis = str | tuple[str, ...] | None
"""Logical axis of one array dimension. A tuple names several axes that are flattened into one
dimension, major first. None means that the dimension is never sharded."""

LogicalAxes = tuple[LogicalAxis, ...]
"""Logical axis of each dimension of an array."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes how a model is sharded over a mesh.

    Modules name logical axes only. A layout translates them to mesh axes. :meth:`psum`,
    :meth:`all_gather` and :meth:`shard_index` may only be called inside :meth:`shard_map`.

    Raises:
      ValueError: the rules shard experts over axes that do not shard the batch before axes that do;
        a rule or ``fsdp_axes`` names an axis that the mesh lacks; ``fsdp_axes`` is combined with a
        sharded vocabulary; ``micro_batches`` is below 1; ``bfloat16_combine`` is set but no rule
        shards experts.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules = DEFAULT_RULES
    exchange: Exchange = "all_gather"
    """Collective that moves tokens to experts on other devices."""
    float8_dispatch: bool = False
    """Whether tokens travel to their experts in float8, with one scale per 128 columns. Results
    travel back in :attr:`combine_dtype`."""
    micro_batches: int = 1
    """Number of micro-batches that each device splits its sequences into. They run through a layer
    one after the other, so that the exchange of one overlaps the compute of another. Every
    micro-batch reads the expert weights again."""
    fsdp_axes: tuple[str, ...] = ()
    """Mesh axes over which parameters are stored sharded although computation needs them whole.
    They are gathered where a layer uses them: see :mod:`sharding.fsdp`."""
    bfloat16_combine: bool = False
    """Whether partial sums of experts travel back in bfloat16, as in DeepSeek's deployments.
    Requires rules that shard experts."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches: expected 1 or more, got {self.micro_batches}")
        for axis in self.rules.table:
            self.rules.sharding(self.mesh, "rules", (0,), (axis,))
        if self.exchange_axes + self.reduce_axes != self.mesh_axes("expert"):
            raise ValueError(
                "rules: expected experts over axes of the batch first, then over others, got "
                f"expert over {self.mesh_axes('expert')} and batch over {self.mesh_axes('batch')}"
            )
        if self.bfloat16_combine and not self.rules.table.get("expert"):
            raise ValueError(
                "bfloat16_combine: expected rules that shard experts over devices, got none:"
                " no partial sum is sent"
            )
        for axis in self.fsdp_axes:
            if axis not in self.mesh.shape:
                raise ValueError(
                    f"fsdp_axes: expected mesh axes among {', '.join(self.mesh.shape)};"
                    f" got {axis!r}"
                )
        if self.fsdp_axes and self.mesh_axes("vocab"):
            raise ValueError(
                "fsdp_axes: expected axis 'vocab' unsharded, got it over mesh axis"
                f" {' x '.join(self.mesh_axes('vocab'))}: embedding and head can only be gathered"
                " when the rules leave their rows whole"
            )

    @property
    def platform(self) -> str | None:
        """Platform of the mesh's devices, as in :mod:`pallas_kernels.target`, or None if the mesh
        is abstract."""
        return mesh_platform(self.mesh)

    def mesh_axes(self, axis: LogicalAxis) -> tuple[str, ...]:
        """Returns the mesh axes that shard a logical axis, major first.

        Mesh axes of size 1 are left out. A logical axis without a rule is not sharded.
        """
        if isinstance(axis, tuple):
            return tuple(a for one in axis for a in self.mesh_axes(one))
        if axis not in self.rules.table:
            return ()
        return tuple(a for a in self.rules.mesh_axes(axis) if self.mesh.shape[a] > 1)

    def num_shards(self, axis: LogicalAxis) -> int:
        """Returns the number of shards of a logical axis; 1 if it is not sharded."""
        return math.prod(self.mesh.shape[a] for a in self.mesh_axes(axis))

    @property
    def exchange_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard both experts and the batch. Tokens are exchanged along them."""
        batch = self.mesh_axes("batch")
        return tuple(a for a in self.mesh_axes("expert") if a in batch)

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard experts but not the batch. Along them every device has the same
        tokens, and partial sums are reduced."""
        batch = self.mesh_axes("batch")
        return tuple(a for a in self.mesh_axes("expert") if a not in batch)

    @property
    def combine_dtype(self) -> DTypeLike:
        """Dtype in which partial sums of experts travel back to their tokens' devices."""
        return jnp.bfloat16 if self.bfloat16_combine else jnp.float32

    def partition_spec(self, axes: LogicalAxes) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these logical axes."""
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in axes))

    def sequences_spec(self, length: int) -> PartitionSpec:
        """Returns the PartitionSpec of arrays [B, T, ...] of whole sequences of ``length`` tokens.
        The tokens are only sharded if they divide over the devices."""
        shards = self.num_shards("tokens")
        is_sharded = shards > 1 and length % shards == 0
        return self.partition_spec(("batch", "tokens") if is_sharded else ("batch",))

    def sharding(self, axes: LogicalAxes) -> NamedSharding:
        """Returns the sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.partition_spec(axes))

    def shard_map(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Returns :func:`jax.shard_map` of ``body`` over this mesh, without the check of
        replication (``check_vma=False``)."""
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def psum(self, x: Any, *axes: str) -> Any:
        """Sums ``x`` over the devices that shard any of these logical axes."""
        over = tuple(dict.fromkeys(a for axis in axes for a in self.mesh_axes(axis)))
        return lax.psum(x, over) if over else x

    def all_gather(self, x: jax.Array, axis: LogicalAxis) -> jax.Array:
        """Stacks ``x`` of all devices that shard a logical axis, along a new first dimension."""
        return lax.all_gather(x, self.mesh_axes(axis)) if self.mesh_axes(axis) else x[None]

    def shard_index(self, axis: LogicalAxis) -> Any:
        """Returns the index of this device's shard of a logical axis; 0 if it is not sharded."""
        return lax.axis_index(self.mesh_axes(axis)) if self.mesh_axes(axis) else 0

    @property
    def batch_multiple(self) -> int:
        """Number that the batch size must be a multiple of: shards times micro-batches."""
        return self.num_shards("batch") * self.micro_batches

    def check_length(self, length: int) -> None:
        """Raises ValueError unless whole sequences of ``length`` tokens can be sharded: if their
        tokens are, into two chunks per device (see :mod:`sharding.context_parallel`)."""
        shards = self.num_shards("tokens")
        if shards > 1 and length % (2 * shards):
            raise ValueError(
                f"length: expected a multiple of {2 * shards} tokens per sequence for"
                f" context_devices={shards}, got {length}"
            )

    def check_batch(self, batch_size: int) -> None:
        """Raises ValueError unless ``batch_size`` is a multiple of :attr:`batch_multiple`."""
        if batch_size % self.batch_multiple:
            devices, micro = self.num_shards("batch"), self.micro_batches
            each = f" with {micro} micro-batches each" if micro > 1 else ""
            raise ValueError(
                f"batch: expected a size that divides over {devices} devices{each}, got"
                f" {batch_size}"
            )
