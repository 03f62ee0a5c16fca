"""A training run: its losses, and how evenly its experts were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer

from dsv3_jax.training import record
from dsv3_jax.training.journal import Row, read_rows
from dsv3_jax.training.run import EXPERT_LOAD, METRICS
from dsv3_jax.viz.canvas import new_figure, save
from dsv3_jax.viz.routing import draw_load, moe_layer_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NAMED = 16  # lines that a legend names


def draw_run(out: Path) -> tuple[Path, Path]:
    """Draws ``loss.png`` and ``expert_load.png`` into the directory of a run.

    Raises:
      ValueError: the directory has no run.json, which names the layers.
    """
    model = record.read(out)["model"]
    rows, last = read_rows(out / METRICS), np.load(out / EXPERT_LOAD)
    layers = moe_layer_names(model["first_k_dense_replace"], model["num_hidden_layers"], len(last))
    loss, load = out / "loss.png", out / "expert_load.png"
    save(losses(rows), loss)
    save(expert_load(rows, last, layers), load)
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
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def expert_load(
    rows: Sequence[Row], load: Integer[np.ndarray, "L E"], layers: Sequence[str] | None = None
) -> Figure:
    """Each layer's largest load over the mean, step by step; and every expert's at the end.

    Args:
      load: tokens that chose each expert of each MoE layer in the last step, the MTP layers' last.
      layers: names of the L layers, see :func:`dsv3_jax.viz.routing.moe_layer_names`. None counts
        MoE layers from 0.
    """
    from matplotlib import colormaps

    names = [f"MoE layer {i}" for i in range(len(load))] if layers is None else layers
    training = [row for row in rows if "expert_load" in row]
    steps = [row["step"] for row in training]
    worst = np.array([row["expert_load"] for row in training]).reshape(len(steps), -1)
    figure = new_figure(8, 7)
    over_steps, by_expert = figure.subplots(2, 1)
    # From dark to light with depth, MTP layers dashed. Of many lines the first and last are named.
    for i, name in enumerate(names):
        drafting = name.startswith("MTP")
        depth = 0.9 * i / max(len(names) - 1, 1)
        color = "tab:red" if drafting else colormaps["viridis"](depth)
        named = len(names) <= _NAMED or i in (0, len(names) - 1) or drafting
        style = "--" if drafting else "-"
        over_steps.plot(steps, worst[:, i], style, color=color, lw=1, label=name if named else None)
    over_steps.plot(steps, worst.mean(axis=1), color="black", lw=1.8, label="mean of the layers")
    over_steps.set(
        xlabel="step",
        ylabel="largest load / mean load",
        title="load of the busiest expert of each MoE layer",
    )
    over_steps.grid(alpha=0.3)
    over_steps.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    image = draw_load(by_expert, load, "load of every expert in the last step", layers=names)
    figure.colorbar(image, ax=by_expert, label="load / mean load")
    return figure
