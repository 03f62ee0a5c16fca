"""Experts: who is chosen how often, how biases even that out, and what it makes of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Integer, Real

from dsv3_jax.viz.canvas import new_figure, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


_TICKS = 12  # names of layers beside a map, at the most, and the last


def moe_layer_names(dense: int, layers: int, count: int) -> list[str]:
    """Returns names of MoE layers as the model counts its layers: ``layer 3``, ``layer 4``, ...,
    ``MTP layer``.

    Args:
      dense: dense layers before the first MoE layer (``config.first_k_dense_replace``).
      layers: layers of the model without its MTP layers (``config.num_hidden_layers``).
      count: how many names; those past the model's layers are MTP layers.
    """
    own = [f"layer {i}" for i in range(dense, layers)][:count]
    drafting = count - len(own)
    if drafting == 1:
        return [*own, "MTP layer"]
    return own + [f"MTP layer {i}" for i in range(drafting)]


def load_maps(
    counts: Mapping[str, Real[np.ndarray, "L E"]], layers: Sequence[str] | None = None
) -> Figure:
    """Load of each expert of each MoE layer over the layer's mean, a map for each kind of text,
    all on one scale.

    Args:
      counts: tokens that chose each expert, by what they are of.
      layers: names of the L layers, see :func:`moe_layer_names`. None counts MoE layers from 0.
    """
    figure = new_figure(1 + 3.8 * len(counts), 2.9)
    panels = figure.subplots(1, len(counts), squeeze=False, sharey=True)[0]
    most = max([2.0, *(float(_shares(load).max(initial=0)) for load in counts.values())])
    images = []
    for axes, (name, load) in zip(panels, counts.items(), strict=True):
        images.append(draw_load(axes, load, name, most, layers))
        axes.label_outer()
    figure.colorbar(images[0], ax=panels, label="load / mean load")
    return figure


def draw_load(
    axes: Axes,
    counts: Real[np.ndarray, "L E"],
    title: str,
    most: float | None = None,
    layers: Sequence[str] | None = None,
) -> AxesImage:
    """One map of load over mean load; white is the mean, and colours end at ``most`` times it."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    shares = _shares(counts)
    most = max(2.0, float(shares.max(initial=0))) if most is None else most
    image = axes.imshow(shares, aspect="auto", cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, most))
    axes.set(xlabel="expert", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if layers is None:
        axes.set_ylabel("MoE layer, counted from 0")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        every = -(-len(layers) // _TICKS)
        shown = sorted({*range(0, len(layers), every), len(layers) - 1})
        axes.set_yticks(shown, [layers[i] for i in shown], fontsize="small")
    return image


def token_routes(
    tokens: Sequence[str],
    experts: Integer[np.ndarray, "L T K"],
    weights: Float[np.ndarray, "L T K"],
    num_experts: int,
    layers: Sequence[str] | None = None,
) -> Figure:
    """Tokens to the right, layers down: in each field a bar for each chosen expert, as high as its
    share of the token's weight and in the expert's colour, the heaviest below.

    Args:
      tokens: the text of each of the T tokens.
      layers: as :func:`load_maps` takes them.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    L, T, K = experts.shape
    figure = new_figure(max(6.0, 1.2 + 0.42 * T), 1.6 + 0.85 * L)
    panels = figure.subplots(L, 1, squeeze=False, sharex=True)[:, 0]
    colors = [colormaps["tab20"](e % 20) for e in range(num_experts)]
    order = np.argsort(-weights, axis=-1)
    experts = np.take_along_axis(experts, order, -1)
    shares = np.take_along_axis(weights, order, -1)
    shares = shares / shares.sum(-1, keepdims=True)
    for layer, axes in enumerate(panels):
        bottom = np.zeros(T)
        for k in range(K):
            of_token = [colors[e] for e in experts[layer, :, k]]
            axes.bar(range(T), shares[layer, :, k], 0.92, bottom, color=of_token)
            for t in range(T):
                middle = bottom[t] + shares[layer, t, k] / 2
                if shares[layer, t, k] > 0.14:
                    number = str(experts[layer, t, k])
                    axes.text(t, middle, number, ha="center", va="center", fontsize=7)
            bottom += shares[layer, :, k]
        axes.set(ylabel=_name(layers, layer), ylim=(0, 1), yticks=[], xlim=(-0.5, T - 0.5))
        axes.spines[:].set_visible(False)
        axes.tick_params(axis="x", length=0)
    shown = [visible(token) for token in tokens]
    panels[-1].set_xticks(
        range(T), shown, rotation=60, ha="right", family="monospace", parse_math=False
    )
    figure.legend(
        handles=[Patch(color=color, label=str(e)) for e, color in enumerate(colors)],
        loc="outside right upper",
        title="expert",
        fontsize="small",
        ncols=2,
    )
    return figure


def bias_updates(
    worst: Float[np.ndarray, "S L"],
    biases: Float[np.ndarray, "S L E"],
    layer: int = 0,
    layers: Sequence[str] | None = None,
) -> Figure:
    """Largest load over mean load of each layer, update by update, and one layer's biases.

    Args:
      worst: before each update.
      biases: of each router, before each update.
      layer: index of the MoE layer whose biases are drawn.
      layers: as :func:`load_maps` takes them.
    """
    S, L = worst.shape
    figure = new_figure(10.5, 3.6)
    loads, of_layer = figure.subplots(1, 2)
    for i in range(L):
        loads.plot(range(S), worst[:, i], lw=1.2, label=_name(layers, i))
    loads.axhline(1.0, color="0.3", ls=":", lw=1)
    loads.annotate("even", (0, 1.0), (0, -12), textcoords="offset points")
    loads.set(xlabel="updates", ylabel="largest load / mean load", ylim=(0.8, None))
    loads.legend()
    of_layer.plot(range(S), biases[:, layer], lw=1)
    of_layer.axhline(0.0, color="0.3", ls=":", lw=1)
    of_layer.set(
        xlabel="updates", ylabel="bias", title=f"{_name(layers, layer)}, a line per expert"
    )
    for axes in (loads, of_layer):
        axes.grid(alpha=0.3)
    loads.set_title("load of the busiest expert")
    return figure


def gpu_loads(
    load: Real[np.ndarray, " E"],
    placements: Mapping[str, Integer[np.ndarray, " P"]],
    num_gpus: int,
) -> Figure:
    """A layer's load on each GPU, a panel for each placement: stacks of experts' shares, each of
    which names its expert. A replica has its part of the expert's load.

    Args:
      placements: the expert at each place; GPU g holds the places from ``g * P // num_gpus``.
    """
    figure = new_figure(1 + 3.4 * len(placements), 3.6)
    panels = figure.subplots(1, len(placements), squeeze=False, sharey=True)[0]
    mean = load.sum() / num_gpus
    for axes, (name, places) in zip(panels, placements.items(), strict=True):
        replicas = np.bincount(places, minlength=len(load))
        held = places.reshape(num_gpus, -1)
        share = load[held] / replicas[held] / mean
        bottom = np.zeros(num_gpus)
        heaviest = share.sum(1).max()
        for slot in range(held.shape[1]):
            copies = replicas[held[:, slot]] > 1
            colors = np.where(copies, "#f4a259", "#8cb0d6")
            axes.bar(range(num_gpus), share[:, slot], 0.86, bottom, color=colors, ec="white")
            for gpu in range(num_gpus):
                if share[gpu, slot] > 0.12:
                    at = bottom[gpu] + share[gpu, slot] / 2
                    axes.text(gpu, at, str(held[gpu, slot]), ha="center", va="center", fontsize=8)
            bottom += share[:, slot]
        axes.axhline(1.0, color="0.2", ls=":", lw=1)
        axes.set(xlabel="GPU", title=f"{name}\nheaviest {heaviest:.2f}x the mean")
        axes.set_xticks(range(num_gpus))
    panels[0].set_ylabel("load / mean load")
    return figure


def _name(layers: Sequence[str] | None, i: int) -> str:
    return f"MoE layer {i}" if layers is None else layers[i]


def _shares(counts: Real[np.ndarray, "L E"]) -> Float[np.ndarray, "L E"]:
    return counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
