"""Plot of a cluster that is scaled over a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dsv3_jax.simulator.scaling import Hour
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#225588", "#ddaa33", "#88ccee")


def scaled_day(days: Mapping[str, Sequence[Hour]], mean_nodes: float, peak_nodes: float) -> Figure:
    """Plots the load and the nodes of each hour.

    Args:
      days: scaled days by name, all with the same load.
      mean_nodes, peak_nodes: published figures, drawn as lines.
    """
    figure = new_figure(8, 5)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    edges = range(25)
    load = [hour.requests_per_second for hour in next(iter(days.values()))]
    top.stairs(load, edges, color=_COLORS[2], fill=True)
    top.set(ylabel="requests/s")
    for color, (name, hours) in zip(_COLORS, days.items(), strict=False):
        nodes = [hour.nodes for hour in hours]
        label = f"{name}: mean {sum(nodes) / len(nodes):.0f}, peak {max(nodes)}"
        bottom.stairs(nodes, edges, color=color, linewidth=2, label=label)
    for nodes, style, name in ((mean_nodes, "--", "mean"), (peak_nodes, ":", "peak")):
        label = f"published {name}: {nodes:g}"
        bottom.axhline(nodes, color="#999999", linestyle=style, label=label)
    bottom.set(xlabel="hour", ylabel="nodes of eight H800", xlim=(0, 24), ylim=(0, None))
    bottom.legend(loc="lower center", fontsize=8, ncols=2)
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
