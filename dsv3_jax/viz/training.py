"""A training run: its losses, and how evenly its experts were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer

from dsv3_jax.training.journal import Row, read_rows
from dsv3_jax.training.run import EXPERT_LOAD, METRICS
from dsv3_jax.viz.canvas import new_figure, save
from dsv3_jax.viz.routing import draw_load

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_run(out: Path) -> tuple[Path, Path]:
    """Draws ``loss.png`` and ``expert_load.png`` into the directory of a run."""
    rows = read_rows(out / METRICS)
    loss, load = out / "loss.png", out / "expert_load.png"
    save(losses(rows), loss)
    save(expert_load(rows, np.load(out / EXPERT_LOAD)), load)
    return loss, load


def losses(rows: Sequence[Row], title: str = "") -> Figure:
    """Next-token and MTP loss over steps, lines in training and points on held-out text."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    training = [row for row in rows if "losses" in row]
    held_out = [row for row in rows if "held_out" in row]
    for name, label in (("main", "next token"), ("mtp", "MTP, token after next")):
        steps = [row["step"] for row in training]
        values = [row["losses"][name] for row in training]
        (line,) = axes.plot(steps, values, lw=1, label=f"training: {label}")
        axes.plot(
            [row["step"] for row in held_out],
            [row["held_out"][name] for row in held_out],
            "o",
            color=line.get_color(),
            label=f"held out: {label}",
        )
    axes.set(xlabel="step", ylabel="nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def expert_load(rows: Sequence[Row], load: Integer[np.ndarray, "L E"]) -> Figure:
    """Each layer's largest load over the mean, step by step; and every expert's at the end.

    Args:
      load: tokens that chose each expert of each MoE layer in the last step, the MTP layers' last.
    """
    training = [row for row in rows if "expert_load" in row]
    steps = [row["step"] for row in training]
    worst = np.array([row["expert_load"] for row in training]).reshape(len(steps), -1)
    figure = new_figure(7, 7)
    over_steps, by_expert = figure.subplots(2, 1)
    over_steps.plot(steps, worst, lw=0.6, alpha=0.5)
    over_steps.plot(steps, worst.mean(axis=1), color="black", label="mean of the layers")
    over_steps.set(xlabel="step", ylabel="largest load / mean load")
    over_steps.grid(alpha=0.3)
    over_steps.legend()
    figure.colorbar(draw_load(by_expert, load, "load / mean load, last step"), ax=by_expert)
    return figure
