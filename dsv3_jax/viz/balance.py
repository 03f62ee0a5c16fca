"""Expert load over the steps of several runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxtyping import Float
from numpy import ndarray

from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def balance(
    runs: Mapping[str, tuple[Float[ndarray, " steps"], Float[ndarray, "steps L_moe"]]],
) -> Figure:
    """Largest load over mean load of each MoE layer, thin, and their mean.

    Args:
      runs: of each, the steps and the loads.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for i, (label, (steps, loads)) in enumerate(runs.items()):
        axes.plot(steps, loads, color=f"C{i}", lw=0.6, alpha=0.4)
        axes.plot(steps, loads.mean(axis=1), color=f"C{i}", label=label)
    axes.set(
        xlabel="step",
        ylabel="largest load / mean load",
        title="thin: each MoE layer; thick: their mean",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
