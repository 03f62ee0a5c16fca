"""Plot of mesh layouts: the shards of each device, and the collectives between devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv3_jax.layer_collectives import Collective
from dsv3_jax.viz.canvas import new_axes
from sharding import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Label and colour of each logical axis.
_AXES = {
    "batch": ("batch", "tab:blue"),
    "heads": ("heads", "tab:orange"),
    "expert": ("experts", "tab:green"),
    "expert_ffn": ("expert hidden units", "tab:purple"),
}

_DEVICE_PITCH, _LINE_PITCH = 1.1, 0.15  # in units of a device's box, which has width 1


def mesh(
    layouts: Mapping[str, Layout],
    collectives: Mapping[str, tuple[Sequence[Collective], Sequence[Collective]]],
) -> Figure:
    """Plots the devices of each layout as boxes, and below them the collectives of a layer as lines
    that connect the devices of a group.

    Each box has a bar for the batch, for heads, for experts and for the hidden units of an expert.
    The filled part of a bar is the device's shard.

    Args:
      collectives: by layout, the collectives of a dense layer and those of a MoE layer, as
        :func:`dsv3_jax.layer_collectives.layer_collectives` returns them.
    """
    width = max(layout.mesh.size for layout in layouts.values())
    lines = {name: sum(max(len(each), 1) for each in collectives[name]) for name in layouts}
    height = sum(1.55 + _LINE_PITCH * lines[name] for name in layouts)
    figure, axes = new_axes(0.95 * width + 4.4, 0.95 * height + 0.4)
    top = 0.0
    for name, layout in layouts.items():
        shards = {axis: _shard_indices(layout, axis) for axis in _AXES}
        for device in range(layout.mesh.size):
            left, bottom = device * _DEVICE_PITCH, top - 1
            axes.add_patch(_rectangle((left, bottom), 1.0, 1.0, fill=False, color="gray", lw=0.8))
            for i, (axis, indices) in enumerate(shards.items()):
                y = bottom + 0.78 - 0.23 * i
                count, own = indices.max() + 1, indices[device]
                axes.add_patch(_rectangle((left + 0.08, y), 0.84, 0.16, color="0.9"))
                filled = (left + 0.08 + 0.84 * own / count, y), 0.84 / count, 0.16
                axes.add_patch(_rectangle(*filled, color=_AXES[axis][1]))
        axes.text(-0.2, top - 0.5, name, ha="right", va="center", fontsize=10)
        y = top - 1.15
        for layer, of_layer in zip(("dense layer", "MoE layer"), collectives[name], strict=True):
            none = "" if of_layer else ": no collective"
            axes.text(-0.2, y, layer + none, ha="right", va="center", fontsize=8)
            for collective in of_layer:
                for group in collective.groups:
                    centers = [(device + 0.5) * _DEVICE_PITCH - 0.05 for device in group]
                    axes.plot(centers, [y] * len(centers), "o-", color="black", ms=3, lw=1)
                end = layout.mesh.size * _DEVICE_PITCH
                axes.text(end, y, collective.name, ha="left", va="center", fontsize=8)
                y -= _LINE_PITCH
            y -= 0 if of_layer else _LINE_PITCH
        top = y - 0.4
    for i, (label, color) in enumerate(_AXES.values()):
        axes.text(_DEVICE_PITCH * i, 0.15, label, color=color, fontsize=9)
    axes.set_xlim(-2.6, _DEVICE_PITCH * width + 1.0)
    axes.set_ylim(top + 0.4, 0.4)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def _shard_indices(layout: Layout, axis: str) -> np.ndarray:
    """Returns the index of each device's shard of a logical axis, in the order of the mesh."""
    names, shape = layout.mesh.axis_names, tuple(layout.mesh.shape.values())
    index, coordinates = np.zeros(shape, int), np.indices(shape)
    for name in layout.mesh_axes(axis):
        index = index * layout.mesh.shape[name] + coordinates[names.index(name)]
    return index.reshape(-1)


def _rectangle(*geometry: Any, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(*geometry, **style)
