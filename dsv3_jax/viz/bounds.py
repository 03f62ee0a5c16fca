"""Plot of the lower bounds on the time of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"weights": "tab:blue", "cache": "#9ecae1"}
_COLORS |= {"arithmetic": "tab:orange", "network": "tab:green"}
_MEMORY = "memory: weights (dark),\ncache (light)"


def bounds(rooflines: Mapping[str, Roofline]) -> Figure:
    """Plots the lower bounds on the time of each pass, one panel per pass with its own time axis.

    Each panel has three bars: reading the weights and then the cache, arithmetic, and network. The
    pass takes at least as long as the longest bar. The title names the bottleneck and its time.
    """
    figure = new_figure(8, 1.25 * len(rooflines) + 0.3)
    panels = figure.subplots(len(rooflines), 1, squeeze=False)[:, 0]
    for axes, (name, roofline) in zip(panels, rooflines.items(), strict=True):
        left = 0.0
        for resource, color in _COLORS.items():
            bar = _MEMORY if resource in ("weights", "cache") else resource
            width = 1e3 * getattr(roofline, resource)
            axes.barh(bar, width, left=left, color=color, height=0.7)
            left = width if resource == "weights" else 0.0
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        title = f"{name}: {1e3 * roofline.seconds:,.1f} ms, limited by {roofline.binding}"
        axes.set_title(title, fontsize=10)
    panels[-1].set_xlabel("time (ms, lower bound)")
    return figure
