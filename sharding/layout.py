"""A mesh, what of a model it splits, and how tokens reach experts that other devices hold."""

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

from sharding.expert_parallel import platform_of
from sharding.names import Exchange
from sharding.rules import DEFAULT_RULES, Rules

Axis = str | tuple[str, ...] | None
"""A logical axis; several that one dimension counts, the first of them in the larger parts; None
for what is never split."""

Axes = tuple[Axis, ...]
"""Of each dimension of an array."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on devices. Modules name logical axes alone; this knows the mesh's.

    Methods that say so are for code inside :meth:`local`, where each device has its part of every
    array.

    Raises:
      ValueError: experts split over axes that the batch is not split over before those that it is;
        a rule or a storage of an axis that the mesh lacks; storage beside words that are split;
        less than one micro-batch; ``bfloat16_combine`` with experts that no rule splits.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules = DEFAULT_RULES
    exchange: Exchange = "all_gather"
    """How tokens travel where experts lie on devices with other tokens."""
    float8_dispatch: bool = False
    """Tokens travel to their experts in float8, a scale for each 128 columns; back in float32."""
    micro_batches: int = 1
    """Parts of a device's rows that go through a layer one behind the other, so that one's tokens
    can travel while another's are computed. Experts' weights are read once for each."""
    storage: tuple[str, ...] = ()
    """Axes of the mesh along which devices that would hold copies of a parameter hold a part each,
    which is gathered where it is used: see :mod:`sharding.storage`."""
    bfloat16_combine: bool = False
    """Each device's part of an experts' sum travels back in bfloat16, as DeepSeek's do; of rules
    that split experts."""

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches: expected 1 or more, got {self.micro_batches}")
        for axis in self.rules.table:
            self.rules.sharding(self.mesh, "rules", (0,), (axis,))
        exchanged, reduced = self.expert_axes
        if exchanged + reduced != self.axes("expert"):
            raise ValueError(
                "rules: expected experts over axes of the batch first, then over others, got "
                f"expert over {self.axes('expert')} and batch over {self.axes('batch')}"
            )
        if self.bfloat16_combine and not self.rules.table.get("expert"):
            raise ValueError(
                "bfloat16_combine: expected rules that split experts over devices, got none:"
                " no sum travels"
            )
        for axis in self.storage:
            if axis not in self.mesh.shape:
                raise ValueError(
                    f"storage: expected mesh axes among {', '.join(self.mesh.shape)}; got {axis!r}"
                )
        if self.storage and self.axes("vocab"):
            raise ValueError(
                "storage: expected axis 'vocab' on every device whole, got it over mesh axis"
                f" {' x '.join(self.axes('vocab'))}: embedding and head are gathered by rows alone"
            )

    @property
    def platform(self) -> str | None:
        """Of the mesh's devices, as :mod:`pallas_kernels.target` names them; None without any."""
        return platform_of(self.mesh)

    def axes(self, axis: Axis) -> tuple[str, ...]:
        """Axes of the mesh, of more than one device, that split a logical axis; none without a
        rule for it."""
        if isinstance(axis, tuple):
            return tuple(a for one in axis for a in self.axes(one))
        if axis not in self.rules.table:
            return ()
        return tuple(a for a in self.rules.mesh_axes(axis) if self.mesh.shape[a] > 1)

    def parts(self, axis: Axis) -> int:
        """How many a logical axis is split into."""
        return math.prod(self.mesh.shape[a] for a in self.axes(axis))

    @property
    def expert_axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those over which tokens differ too, so that they travel, and those over which every
        device has the same tokens, so that results are summed."""
        batch = self.axes("batch")
        of_experts = self.axes("expert")
        return (
            tuple(a for a in of_experts if a in batch),
            tuple(a for a in of_experts if a not in batch),
        )

    @property
    def combine_dtype(self) -> DTypeLike:
        """Of parts of experts' sums on their way back."""
        return jnp.bfloat16 if self.bfloat16_combine else jnp.float32

    def spec(self, axes: Axes) -> PartitionSpec:
        return PartitionSpec(*(self.axes(axis) or None for axis in axes))

    def sharding(self, axes: Axes) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def local(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``body`` on every device, of the parts of arrays that lie there."""
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def total(self, x: Any, *axes: str) -> Any:
        """Inside :meth:`local`: the sum over the devices that split any of these logical axes."""
        over = tuple(dict.fromkeys(a for axis in axes for a in self.axes(axis)))
        return lax.psum(x, over) if over else x

    def gathered(self, x: jax.Array, axis: Axis) -> jax.Array:
        """Inside :meth:`local`: everyone's, stacked, of the devices that split a logical axis."""
        return lax.all_gather(x, self.axes(axis)) if self.axes(axis) else x[None]

    def index(self, axis: Axis) -> Any:
        """Inside :meth:`local`: which part of a logical axis this device has."""
        return lax.axis_index(self.axes(axis)) if self.axes(axis) else 0

    @property
    def row_multiple(self) -> int:
        """What the rows of a batch divide by: devices that split it, and micro-batches there."""
        return self.parts("batch") * self.micro_batches

    def check_batch(self, rows: int) -> None:
        """Raises ValueError for rows that do not divide so."""
        if rows % self.row_multiple:
            parts, micro = self.parts("batch"), self.micro_batches
            each = f" with {micro} micro-batches each" if micro > 1 else ""
            raise ValueError(
                f"batch: expected rows that divide over {parts} devices{each}, got {rows}"
            )
