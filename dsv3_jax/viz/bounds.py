"""The least time of a pass, by what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bounds(rooflines: Mapping[str, Roofline]) -> Figure:
    """Milliseconds of reading weights and cache, which add up, of arithmetic and of the network. A
    pass takes the longest of the three bars at the least, which is named."""
    figure = new_figure(7.5, 0.9 * len(rooflines) + 1.1)
    axes = figure.subplots()
    places = range(len(rooflines))
    found = list(rooflines.values())
    weights = [1e3 * each.weights for each in found]
    style = {"height": 0.24}
    above, level, below = ([place + shift for place in places] for shift in (-0.26, 0, 0.26))
    axes.barh(above, weights, label="reading weights", color="tab:blue", **style)
    cache = [1e3 * each.cache for each in found]
    axes.barh(above, cache, left=weights, label="reading the cache", color="tab:cyan", **style)
    arithmetic = [1e3 * each.arithmetic for each in found]
    axes.barh(level, arithmetic, label="arithmetic", color="tab:orange", **style)
    network = [1e3 * each.network for each in found]
    axes.barh(below, network, label="network", color="tab:green", **style)
    names = [
        f"{name}\n{each.binding}, {1e3 * each.seconds:,.1f} ms" for name, each in rooflines.items()
    ]
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set(xlabel="ms at the least", xscale="log")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8)
    return figure
