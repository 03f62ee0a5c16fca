"""Sharding rules: the mesh axes that shard each logical axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None
"""Mesh axes that shard one logical axis, major first. None leaves it unsharded."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """Maps logical axes to mesh axes."""

    table: Mapping[str, MeshAxes]
    """Mesh axes of each logical axis. Read-only."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", MappingProxyType(dict(self.table)))

    def __hash__(self) -> int:
        return hash(frozenset(self.table.items()))

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Returns the mesh axes that shard a logical axis, major first.

        Raises:
          ValueError: there is no rule for the axis.
        """
        if axis is None:
            return ()
        if axis not in self.table:
            raise ValueError(f"expected an axis among {', '.join(self.table)}; got {axis!r}")
        mesh_axes = self.table[axis] or ()
        return (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)

    def sharding(
        self,
        mesh: Mesh | AbstractMesh,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        block: tuple[int, ...] | None = None,
    ) -> NamedSharding:
        """Returns the sharding of an array on ``mesh``. Needs no array, only its shape.

        Args:
          name: name of the array, for error messages.
          axes: logical axis of each dimension; None for a dimension that is never sharded.
          block: for each dimension, the number of consecutive elements that must stay on one
            device, such as weights under one scale.

        Raises:
          ValueError: a logical axis has no rule, ``mesh`` lacks a mesh axis, a mesh axis would
            shard two dimensions, a dimension does not divide, or a block would be split.
        """
        if len(axes) != len(shape):
            raise ValueError(f"{name}: expected an axis for each of {shape}, got {axes}")
        by_dimension = tuple(self._checked_mesh_axes(mesh, name, axis) for axis in axes)
        used = [mesh_axis for mesh_axes in by_dimension for mesh_axis in mesh_axes]
        if twice := [mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1]:
            raise ValueError(
                f"{name}: expected each mesh axis once, got {twice[0]!r} twice for axes {axes}"
            )
        for size, axis, mesh_axes, block_size in zip(
            shape, axes, by_dimension, block or (1,) * len(shape), strict=True
        ):
            shards = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
            over = f"over {shards} devices of mesh axis {' x '.join(mesh_axes)}"
            if size % shards:
                raise ValueError(f"{name}: expected axis {axis!r} to divide {over}, got {size}")
            if shards > 1 and size // shards % block_size:
                raise ValueError(
                    f"{name}: expected whole blocks of {block_size} along axis {axis!r}, "
                    f"got {size} {over}"
                )
        spec = PartitionSpec(*(mesh_axes or None for mesh_axes in by_dimension))
        return NamedSharding(mesh, spec)

    def _checked_mesh_axes(
        self, mesh: Mesh | AbstractMesh, name: str, axis: str | None
    ) -> tuple[str, ...]:
        try:
            mesh_axes = self.mesh_axes(axis)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        for mesh_axis in mesh_axes:
            if mesh_axis not in mesh.shape:
                raise ValueError(
                    f"{name}: the rule for {axis!r}: expected a mesh axis among "
                    f"{', '.join(mesh.shape)}; got {mesh_axis!r}"
                )
        return mesh_axes


DEFAULT_RULES = Rules(
    {
        "batch": "data",
        "tokens": None,  # within a sequence, in training
        "cached_tokens": None,  # within a sequence
        "expert": "expert",
        "vocab": "tensor",
        "heads": "tensor",
        "head_dim": None,
        "ffn": "tensor",
        "shared_ffn": "tensor",
        "expert_ffn": "tensor",
        "expert_score": None,  # every token is routed among all experts
        "replica": None,
        "hidden": None,
        "joined_hidden": None,
        "q_rank": None,
        "latent": None,
        "indexer": None,  # every device selects the same tokens for its own heads
    }
)
"""Rules for the axes of :func:`~sharding.mesh.make_mesh`: expert parallelism, and tensor
parallelism over heads, hidden widths of MLPs and the vocabulary."""
