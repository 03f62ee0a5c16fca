"""Plots of expert routing: expert load, token routes, bias updates and load per GPU."""

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


_MAX_TICKS = 12  # layer names next to a map, not counting the last layer


def moe_layer_names(dense: int, layers: int, count: int) -> list[str]:
    """Returns the names of MoE layers, numbered as the layers of the model: ``layer 3``, ``layer
    4``, ..., ``MTP layer``.

    Args:
      dense: number of dense layers before the first MoE layer (``config.first_k_dense_replace``).
      layers: number of layers without MTP layers (``config.num_hidden_layers``).
      count: number of names. Names after those of the main model's layers are of MTP layers.
    """
    main = [f"layer {i}" for i in range(dense, layers)][:count]
    mtp = count - len(main)
    if mtp == 1:
        return [*main, "MTP layer"]
    return main + [f"MTP layer {i}" for i in range(mtp)]


def load_maps(
    counts: Mapping[str, Real[np.ndarray, "L E"]], layers: Sequence[str] | None = None
) -> Figure:
    """Plots the load of each expert divided by the mean load of its MoE layer, with one map per
    text and the same colour scale for all maps.

    Args:
      counts: number of tokens that chose each expert, by name of the text.
      layers: names of the L layers, see :func:`moe_layer_names`. By default MoE layers are numbered
        from 0.
    """
    figure = new_figure(1 + 3.8 * len(counts), 2.9)
    panels = figure.subplots(1, len(counts), squeeze=False, sharey=True)[0]
    maximum = max([2.0, *(float(_relative(load).max(initial=0)) for load in counts.values())])
    images = []
    for axes, (name, load) in zip(panels, counts.items(), strict=True):
        images.append(draw_load(axes, load, name, maximum, layers))
        axes.label_outer()
    figure.colorbar(images[0], ax=panels, label="load / mean load")
    return figure


def draw_load(
    axes: Axes,
    counts: Real[np.ndarray, "L E"],
    title: str,
    maximum: float | None = None,
    layers: Sequence[str] | None = None,
) -> AxesImage:
    """Draws a map of load divided by mean load. The mean is white.

    Args:
      maximum: end of the colour scale, in units of the mean load.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    relative = _relative(counts)
    maximum = max(2.0, float(relative.max(initial=0))) if maximum is None else maximum
    norm = TwoSlopeNorm(1.0, 0.0, maximum)
    image = axes.imshow(relative, aspect="auto", cmap="RdBu_r", norm=norm)
    axes.set(xlabel="expert", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if layers is None:
        axes.set_ylabel("MoE layer (from 0)")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        stride = -(-len(layers) // _MAX_TICKS)
        ticks = sorted({*range(0, len(layers), stride), len(layers) - 1})
        axes.set_yticks(ticks, [layers[i] for i in ticks], fontsize="small")
    return image


def token_routes(
    tokens: Sequence[str],
    experts: Integer[np.ndarray, "L T K"],
    weights: Float[np.ndarray, "L T K"],
    num_experts: int,
    layers: Sequence[str] | None = None,
) -> Figure:
    """Plots the experts that each token is routed to, with one panel per layer and one stack of
    bars per token.

    Each bar is an expert. Its height is the expert's fraction of the token's routing weights, and
    the expert with the largest weight is at the bottom.

    Args:
      tokens: texts of the T tokens.
      experts: chosen experts.
      weights: routing weights of the chosen experts.
      num_experts: number of routed experts per layer.
      layers: names of the layers, as in :func:`load_maps`.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    L, T, K = experts.shape
    figure = new_figure(max(6.0, 1.2 + 0.42 * T), 1.6 + 0.85 * L)
    panels = figure.subplots(L, 1, squeeze=False, sharex=True)[:, 0]
    colors = [colormaps["tab20"](e % 20) for e in range(num_experts)]
    order = np.argsort(-weights, axis=-1)
    experts = np.take_along_axis(experts, order, -1)
    fractions = np.take_along_axis(weights, order, -1)
    fractions = fractions / fractions.sum(-1, keepdims=True)
    for layer, axes in enumerate(panels):
        bottom = np.zeros(T)
        for k in range(K):
            bar_colors = [colors[e] for e in experts[layer, :, k]]
            axes.bar(range(T), fractions[layer, :, k], 0.92, bottom, color=bar_colors)
            for t in range(T):
                middle = bottom[t] + fractions[layer, t, k] / 2
                if fractions[layer, t, k] > 0.14:
                    expert = str(experts[layer, t, k])
                    axes.text(t, middle, expert, ha="center", va="center", fontsize=7)
            bottom += fractions[layer, :, k]
        axes.set(ylabel=_name(layers, layer), ylim=(0, 1), yticks=[], xlim=(-0.5, T - 0.5))
        axes.spines[:].set_visible(False)
        axes.tick_params(axis="x", length=0)
    labels = [visible(token) for token in tokens]
    panels[-1].set_xticks(
        range(T), labels, rotation=60, ha="right", family="monospace", parse_math=False
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
    imbalance: Float[np.ndarray, "S L"],
    biases: Float[np.ndarray, "S L E"],
    layer: int = 0,
    layers: Sequence[str] | None = None,
) -> Figure:
    """Plots how bias updates balance the load: the imbalance of each MoE layer and the biases of
    one layer over S updates.

    Args:
      imbalance: maximum load divided by mean load of each layer, before each update.
      biases: biases of each router before each update.
      layer: index of the MoE layer whose biases are shown.
      layers: names of the layers, as in :func:`load_maps`.
    """
    S, L = imbalance.shape
    figure = new_figure(10.5, 3.6)
    load_axes, bias_axes = figure.subplots(1, 2)
    for i in range(L):
        load_axes.plot(range(S), imbalance[:, i], lw=1.2, label=_name(layers, i))
    load_axes.axhline(1.0, color="0.3", ls=":", lw=1)
    load_axes.annotate("balanced", (0, 1.0), (0, -12), textcoords="offset points")
    load_axes.set(xlabel="number of updates", ylabel="maximum load / mean load", ylim=(0.8, None))
    load_axes.legend()
    bias_axes.plot(range(S), biases[:, layer], lw=1)
    bias_axes.axhline(0.0, color="0.3", ls=":", lw=1)
    title = f"router biases of {_name(layers, layer)} (one line per expert)"
    bias_axes.set(xlabel="number of updates", ylabel="bias", title=title)
    for axes in (load_axes, bias_axes):
        axes.grid(alpha=0.3)
    load_axes.set_title("expert load imbalance")
    return figure


def gpu_loads(
    load: Real[np.ndarray, " E"], placements: Mapping[str, Integer[np.ndarray, " P"]], num_gpus: int
) -> Figure:
    """Plots the load of each GPU in one layer, with one panel per placement and one bar per expert
    slot. The load of an expert is divided evenly among its replicas.

    Args:
      load: load of each expert.
      placements: expert of each of P slots, by name of the placement. GPU g has the slots from
        ``g * P // num_gpus`` on.
    """
    figure = new_figure(1 + 3.4 * len(placements), 3.6)
    panels = figure.subplots(1, len(placements), squeeze=False, sharey=True)[0]
    mean = load.sum() / num_gpus
    for axes, (name, placement) in zip(panels, placements.items(), strict=True):
        replicas = np.bincount(placement, minlength=len(load))
        experts = placement.reshape(num_gpus, -1)
        relative = load[experts] / replicas[experts] / mean
        bottom = np.zeros(num_gpus)
        maximum = relative.sum(1).max()
        for slot in range(experts.shape[1]):
            is_replicated = replicas[experts[:, slot]] > 1
            colors = np.where(is_replicated, "#f4a259", "#8cb0d6")
            axes.bar(range(num_gpus), relative[:, slot], 0.86, bottom, color=colors, ec="white")
            for gpu in range(num_gpus):
                if relative[gpu, slot] > 0.12:
                    y, expert = bottom[gpu] + relative[gpu, slot] / 2, str(experts[gpu, slot])
                    axes.text(gpu, y, expert, ha="center", va="center", fontsize=8)
            bottom += relative[:, slot]
        axes.axhline(1.0, color="0.2", ls=":", lw=1)
        axes.set(xlabel="GPU", title=f"{name}\nmaximum {maximum:.2f}x the mean")
        axes.set_xticks(range(num_gpus))
    panels[0].set_ylabel("load / mean load")
    return figure


def _name(layers: Sequence[str] | None, i: int) -> str:
    return f"MoE layer {i}" if layers is None else layers[i]


def _relative(counts: Real[np.ndarray, "L E"]) -> Float[np.ndarray, "L E"]:
    """Returns the load divided by the mean load of the layer."""
    return counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
