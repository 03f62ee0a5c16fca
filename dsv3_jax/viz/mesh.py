"""Devices of a layout: what each holds, and what travels between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv3_jax.layer_collectives import Collective
from dsv3_jax.viz.canvas import new_figure
from sharding import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# An axis of arrays, what it is called, and its color.
_HELD = {
    "batch": ("rows", "tab:blue"),
    "heads": ("heads", "tab:orange"),
    "expert": ("experts", "tab:green"),
    "expert_ffn": ("columns of an expert", "tab:purple"),
}


_APART, _LINE = 1.1, 0.15
"""Between boxes, and between the lines of collectives below them; a box is 1 wide."""


def mesh(
    layouts: Mapping[str, Layout],
    collectives: Mapping[str, tuple[Sequence[Collective], Sequence[Collective]]],
) -> Figure:
    """For each layout a box a device: the part of rows, of heads and of experts that it holds, as
    the filled part of a bar. Below, a line for each collective, a dot at each device of a group.

    Args:
      collectives: of each layout, those of a dense layer and those of a MoE layer, as
        :func:`dsv3_jax.layer_collectives.layer_collectives` finds them.
    """
    width = max(layout.mesh.size for layout in layouts.values())
    lines = {name: sum(max(len(each), 1) for each in collectives[name]) for name in layouts}
    height = sum(1.55 + _LINE * lines[name] for name in layouts)
    figure = new_figure(0.95 * width + 4.4, 0.95 * height + 0.4)
    axes = figure.subplots()
    top = 0.0
    for name, layout in layouts.items():
        parts = {axis: _parts(layout, axis) for axis in _HELD}
        for device in range(layout.mesh.size):
            left, bottom = device * _APART, top - 1
            axes.add_patch(_rectangle((left, bottom), 1.0, 1.0, fill=False, color="gray", lw=0.8))
            for i, (axis, part) in enumerate(parts.items()):
                at = bottom + 0.78 - 0.23 * i
                total, own = part.max() + 1, part[device]
                axes.add_patch(_rectangle((left + 0.08, at), 0.84, 0.16, color="0.9"))
                filled = (left + 0.08 + 0.84 * own / total, at), 0.84 / total, 0.16
                axes.add_patch(_rectangle(*filled, color=_HELD[axis][1]))
        axes.text(-0.2, top - 0.5, name, ha="right", va="center", fontsize=10)
        y = top - 1.15
        for of_layer, found in zip(("dense layer", "MoE layer"), collectives[name], strict=True):
            none = "" if found else ": no collective"
            axes.text(-0.2, y, of_layer + none, ha="right", va="center", fontsize=8)
            for each in found:
                for group in each.groups:
                    at = [(device + 0.5) * _APART - 0.05 for device in group]
                    axes.plot(at, [y] * len(at), "o-", color="black", ms=3, lw=1)
                end = layout.mesh.size * _APART
                axes.text(end, y, each.name, ha="left", va="center", fontsize=8)
                y -= _LINE
            y -= 0 if found else _LINE
        top = y - 0.4
    for i, (word, color) in enumerate(_HELD.values()):
        axes.text(_APART * i, 0.15, word, color=color, fontsize=9)
    axes.set_xlim(-2.6, _APART * width + 1.0)
    axes.set_ylim(top + 0.4, 0.4)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def _parts(layout: Layout, axis: str) -> np.ndarray:
    """Which part of ``axis`` each device holds, in the order of the mesh."""
    names, shape = layout.mesh.axis_names, tuple(layout.mesh.shape.values())
    index, places = np.zeros(shape, int), np.indices(shape)
    for name in layout.mesh_axes(axis):
        index = index * layout.mesh.shape[name] + places[names.index(name)]
    return index.reshape(-1)


def _rectangle(*where: Any, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(*where, **style)
