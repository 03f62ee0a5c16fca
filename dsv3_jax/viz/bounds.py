"""The least time of a pass, by what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_THICK = 0.24


def bounds(rooflines: Mapping[str, Roofline]) -> Figure:
    """Reading weights and cache, which add up, arithmetic and the network, as shares of the longest
    of these three, which bounds the pass and is named."""
    figure = new_figure(7.5, 0.9 * len(rooflines) + 1.1)
    axes = figure.subplots()
    found = list(rooflines.values())

    def share(resource: str) -> list[float]:
        return [getattr(each, resource) / each.seconds for each in found]

    def bar(resource: str, label: str, color: str, shift: float, left: list[float] | None) -> None:
        places = [place + shift for place in range(len(found))]
        start = 0.0 if left is None else left
        axes.barh(places, share(resource), _THICK, left=start, label=label, color=color)

    bar("weights", "reading weights", "tab:blue", -0.26, None)
    bar("cache", "reading the cache", "tab:cyan", -0.26, share("weights"))
    bar("arithmetic", "arithmetic", "tab:orange", 0.0, None)
    bar("network", "network", "tab:green", 0.26, None)
    names = [
        f"{name}\n{each.binding}, {1e3 * each.seconds:,.1f} ms" for name, each in rooflines.items()
    ]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="share of the bound")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3, axis="x")
    figure.legend(fontsize=8, loc="outside upper right", ncols=4)
    return figure
