"""Plot that compares the expert load imbalance of several training runs."""

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
    """Plots the maximum load divided by the mean load over training steps: a thin line per MoE
    layer and a thick line for their mean.

    Args:
      runs: steps, and the imbalance of each layer at these steps, by the run's label.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for i, (label, (steps, imbalance)) in enumerate(runs.items()):
        axes.plot(steps, imbalance, color=f"C{i}", lw=0.6, alpha=0.4)
        axes.plot(steps, imbalance.mean(axis=1), color=f"C{i}", label=label)
    axes.set(
        xlabel="step",
        ylabel="maximum load / mean load",
        title="expert load imbalance (thin: each MoE layer, thick: mean over layers)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
