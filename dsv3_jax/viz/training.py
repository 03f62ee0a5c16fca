"""Plots of training runs: losses, expert load, and the balance of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Integer

from dsv3_jax.training import record
from dsv3_jax.training.metrics_log import Entry, read_metrics
from dsv3_jax.training.record import EXPERT_LOAD, METRICS
from dsv3_jax.viz.canvas import new_axes, new_figure, save
from dsv3_jax.viz.routing import draw_load, moe_layer_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MAX_LABELS = 16  # lines up to which the legend names each of them


def draw_run(out: Path) -> tuple[Path, Path]:
    """Writes ``loss.png`` and ``expert_load.png`` into the directory of a run and returns their
    paths.

    Raises:
      ValueError: the directory has no run.json.
    """
    model = record.read(out)["model"]
    entries, last = read_metrics(out / METRICS), np.load(out / EXPERT_LOAD)
    layers = moe_layer_names(model["first_k_dense_replace"], model["num_hidden_layers"], len(last))
    loss, load = out / "loss.png", out / "expert_load.png"
    save(losses(entries), loss)
    save(expert_load(entries, last, layers), load)
    return loss, load


def losses(entries: Sequence[Entry], title: str = "") -> Figure:
    """Plots the next-token loss and the MTP loss over training steps. Lines show the training
    losses, and points the losses on held-out text.

    Args:
      entries: metrics of a run, as ``read_metrics`` returns them.
    """
    figure, axes = new_axes(7, 4)
    training = [entry for entry in entries if "losses" in entry]
    held_out = [entry for entry in entries if "held_out" in entry]
    for name, label in (("main", "next token"), ("mtp", "MTP")):
        steps = [entry["step"] for entry in training]
        values = [entry["losses"][name] for entry in training]
        (line,) = axes.plot(steps, values, lw=1, label=f"{label}, training")
        axes.plot(
            [entry["step"] for entry in held_out],
            [entry["held_out"][name] for entry in held_out],
            "o",
            color=line.get_color(),
            label=f"{label}, held out",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def expert_load(
    entries: Sequence[Entry], load: Integer[np.ndarray, "L E"], layers: Sequence[str] | None = None
) -> Figure:
    """Plots the maximum load divided by the mean load of each MoE layer over training steps, and a
    map of the load of every expert at the end.

    Args:
      entries: metrics of a run, as ``read_metrics`` returns them.
      load: number of tokens that chose each expert in the last step, in the main model's MoE layers
        and then in the MTP layers.
      layers: names of the L layers, see :func:`dsv3_jax.viz.routing.moe_layer_names`. By default
        MoE layers are numbered from 0.
    """
    from matplotlib import colormaps

    names = [f"MoE layer {i}" for i in range(len(load))] if layers is None else layers
    training = [entry for entry in entries if "expert_load" in entry]
    steps = [entry["step"] for entry in training]
    imbalance = np.array([entry["expert_load"] for entry in training]).reshape(len(steps), -1)
    figure = new_figure(8, 7)
    over_steps, by_expert = figure.subplots(2, 1)
    # Colours go from dark to light with depth. If there are many lines, the legend names the first
    # layer, the last layer and the MTP layers.
    for i, name in enumerate(names):
        is_mtp = name.startswith("MTP")
        depth = 0.9 * i / max(len(names) - 1, 1)
        color = "tab:red" if is_mtp else colormaps["viridis"](depth)
        has_label = len(names) <= _MAX_LABELS or i in (0, len(names) - 1) or is_mtp
        style, label = "--" if is_mtp else "-", name if has_label else None
        over_steps.plot(steps, imbalance[:, i], style, color=color, lw=1, label=label)
    over_steps.plot(steps, imbalance.mean(axis=1), color="black", lw=1.8, label="mean over layers")
    over_steps.set(
        xlabel="step", ylabel="maximum load / mean load", title="expert load imbalance by MoE layer"
    )
    over_steps.grid(alpha=0.3)
    over_steps.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    image = draw_load(by_expert, load, "expert load in the last step", layers=names)
    figure.colorbar(image, ax=by_expert, label="load / mean load")
    return figure


def balance(
    runs: Mapping[str, tuple[Float[np.ndarray, " steps"], Float[np.ndarray, "steps L_moe"]]],
) -> Figure:
    """Plots the maximum load divided by the mean load over training steps: a thin line per MoE
    layer and a thick line for their mean.

    Args:
      runs: steps, and the imbalance of each layer at these steps, by the run's label.
    """
    figure, axes = new_axes(7, 4)
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
