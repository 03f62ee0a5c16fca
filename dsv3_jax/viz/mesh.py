"""Devices of a layout: what each holds, and what travels between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

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


def mesh(
    layouts: Mapping[str, Layout],
    collectives: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]],
) -> Figure:
    """A row for each layout, a box for each device: the part of rows, of heads and of experts
    that it holds, as the filled part of a bar.

    Args:
      collectives: of each layout, those of a dense layer and those of a MoE layer, as
        :func:`dsv3_jax.layer_collectives.layer_collectives` counts them.
    """
    width = max(layout.mesh.size for layout in layouts.values())
    figure = new_figure(0.95 * width + 3.4, 1.55 * len(layouts) + 0.4)
    axes = figure.subplots()
    for y, (name, layout) in enumerate(layouts.items()):
        parts = {axis: _parts(layout, axis) for axis in _HELD}
        for device in range(layout.mesh.size):
            left, bottom = device * 1.1, -1.6 * y
            frame = (left, bottom), 1.0, 1.0
            axes.add_patch(_rectangle(*frame, fill=False, color="gray", lw=0.8))
            for i, (axis, part) in enumerate(parts.items()):
                at = bottom + 0.78 - 0.23 * i
                total, own = part.max() + 1, part[device]
                axes.add_patch(_rectangle((left + 0.08, at), 0.84, 0.16, color="0.9"))
                filled = (left + 0.08 + 0.84 * own / total, at), 0.84 / total, 0.16
                axes.add_patch(_rectangle(*filled, color=_HELD[axis][1]))
        axes.text(-0.2, -1.6 * y + 0.5, name, ha="right", va="center", fontsize=10)
        dense, moe = map(_listed, collectives[name])
        said = f"dense layer: {dense};  MoE layer: {moe}"
        axes.text(0, -1.6 * y - 0.08, said, ha="left", va="top", fontsize=8)
    for i, (word, color) in enumerate(_HELD.values()):
        axes.text(1.1 * i, 1.15, word, color=color, fontsize=9)
    axes.set_xlim(-2.6, 1.1 * width)
    axes.set_ylim(-1.6 * (len(layouts) - 1) - 0.5, 1.4)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def _parts(layout: Layout, axis: str) -> np.ndarray:
    """Which part of ``axis`` each device holds, in the order of the mesh."""
    names, shape = layout.mesh.axis_names, tuple(layout.mesh.shape.values())
    index, places = np.zeros(shape, int), np.indices(shape)
    for name in layout.axes(axis):
        index = index * layout.mesh.shape[name] + places[names.index(name)]
    return index.reshape(-1)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _rectangle(*where: Any, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(*where, **style)
