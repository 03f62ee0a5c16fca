"""One table: which axis of a mesh splits which logical axis of an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> the axis of a mesh that splits it, several together, or None: all devices
    hold all of it."""

    table: Mapping[str, MeshAxes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", MappingProxyType(dict(self.table)))

    def __hash__(self) -> int:
        return hash(frozenset(self.table.items()))

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Those that split a logical axis, the first of them into the largest parts.

        Raises:
          ValueError: there is no rule for it.
        """
        if axis is None:
            return ()
        if axis not in self.table:
            raise ValueError(f"expected an axis among {', '.join(self.table)}; got {axis!r}")
        found = self.table[axis] or ()
        return (found,) if isinstance(found, str) else tuple(found)

    def sharding(
        self,
        mesh: Mesh | AbstractMesh,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        block: tuple[int, ...] | None = None,
    ) -> NamedSharding:
        """How an array lies on ``mesh``. Nothing is computed: call it before anything is loaded.

        Args:
          name: of the array, for messages.
          axes: the logical axis of each dimension; None for one that is never split.
          block: elements of each dimension that stay together, as those under one scale do.

        Raises:
          ValueError: a logical axis without a rule, a mesh axis that ``mesh`` lacks or that would
            split two dimensions, a dimension that does not divide, or a block that would be cut.
        """
        if len(axes) != len(shape):
            raise ValueError(f"{name}: expected an axis for each of {shape}, got {axes}")
        split = tuple(self._mesh_axes(mesh, name, axis) for axis in axes)
        used = [mesh_axis for mesh_axes in split for mesh_axis in mesh_axes]
        if twice := [mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1]:
            raise ValueError(
                f"{name}: expected each mesh axis once, got {twice[0]!r} twice for axes {axes}"
            )
        for size, axis, mesh_axes, together in zip(
            shape, axes, split, block or (1,) * len(shape), strict=True
        ):
            parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in mesh_axes)
            over = f"over {parts} devices of mesh axis {' x '.join(mesh_axes)}"
            if size % parts:
                raise ValueError(f"{name}: expected axis {axis!r} to divide {over}, got {size}")
            if parts > 1 and size // parts % together:
                raise ValueError(
                    f"{name}: expected whole blocks of {together} along axis {axis!r}, "
                    f"got {size} {over}"
                )
        return NamedSharding(mesh, PartitionSpec(*(mesh_axes or None for mesh_axes in split)))

    def _mesh_axes(self, mesh: Mesh | AbstractMesh, name: str, axis: str | None) -> tuple[str, ...]:
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
        "cached_tokens": None,  # of a row
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
    }
)
"""For the axes of :func:`~sharding.mesh.make_mesh`: experts apart, matrices cut where heads, inner
widths and words are."""
