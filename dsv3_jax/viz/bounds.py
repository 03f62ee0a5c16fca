"""The least time of a pass, by what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    "weights": "tab:blue",
    "cache": "#9ecae1",
    "arithmetic": "tab:orange",
    "network": "tab:green",
}
_MEMORY = "weights (dark),\ncache (light)"


def bounds(rooflines: Mapping[str, Roofline]) -> Figure:
    """A panel a pass, each with a scale of its own: milliseconds of reading weights and, behind
    them, the cache; of arithmetic; of the network. A pass takes the longest of the three bars at
    the least, which is named above."""
    figure = new_figure(8, 1.25 * len(rooflines) + 0.3)
    panels = figure.subplots(len(rooflines), 1, squeeze=False)[:, 0]
    for axes, (name, bound) in zip(panels, rooflines.items(), strict=True):
        left = 0.0
        for part, color in _COLORS.items():
            place = _MEMORY if part in ("weights", "cache") else part
            width = 1e3 * getattr(bound, part)
            axes.barh(place, width, left=left, color=color, height=0.7)
            left = width if part == "weights" else 0.0
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.set_title(f"{name}: {bound.binding}, {1e3 * bound.seconds:,.1f} ms", fontsize=10)
    panels[-1].set_xlabel("ms (lower bound)")
    return figure
