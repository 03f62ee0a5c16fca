"""Plots of latent attention: its probabilities, and the memory, traffic and time of its
variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dsv3_jax.viz.canvas import label_log_axis, new_axes, new_figure, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_forms(
    forms: Mapping[str, npt.ArrayLike], words: Sequence[str], title: str = ""
) -> Figure:
    """Plots the attention probabilities of one query as computed by several forms of attention,
    with one panel per form and one row per head.

    Args:
      forms: probabilities [H, S] by name of the form.
      words: texts of the S cached tokens.

    Raises:
      ValueError: the probabilities of a form do not have shape [H, S].
    """
    arrays = {name: np.asarray(values) for name, values in forms.items()}
    for name, values in arrays.items():
        if values.ndim != 2 or values.shape[1] != len(words):
            raise ValueError(f"{name}: expected [heads, {len(words)}], got {list(values.shape)}")
    heads = len(next(iter(arrays.values())))
    height = 0.24 * heads + 0.5
    figure = new_figure(max(6.0, 0.3 * len(words) + 1.5), height * len(arrays) + 1.2)
    panels: Any = figure.subplots(len(arrays), 1, sharex=True, squeeze=False)[:, 0]
    largest = max(float(values.max()) for values in arrays.values())
    for axes, (name, values) in zip(panels, arrays.items(), strict=True):
        axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=largest)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_yticks(range(heads), [f"head {h}" for h in range(heads)], fontsize=8)
        axes.tick_params(length=0)
    labels = [visible(word) for word in words]
    panels[-1].set_xticks(range(len(words)), labels, rotation=90, fontsize=8)
    figure.colorbar(panels[0].images[0], ax=list(panels), label="attention probability", shrink=0.8)
    figure.suptitle(title, fontsize=11)
    return figure


def selection(probabilities: npt.ArrayLike, selected: npt.ArrayLike, title: str = "") -> Figure:
    """Plots the attention probabilities of one query over the positions of the tokens, and which
    tokens sparse attention selects. The axis of probabilities is logarithmic.

    Args:
      probabilities: positive numbers [S].
      selected: booleans [S].

    Raises:
      ValueError: the arrays have different shapes.
    """
    p, is_selected = np.asarray(probabilities), np.asarray(selected)
    if p.shape != is_selected.shape:
        raise ValueError(f"selected: expected {list(p.shape)}, got {list(is_selected.shape)}")
    figure, axes = new_axes(9.0, 3.6)
    positions = np.arange(len(p))
    for name, mask, color in (
        (f"not selected: {p[~is_selected].sum():.0%} of the attention", ~is_selected, "0.7"),
        (f"selected: {p[is_selected].sum():.0%}", is_selected, "tab:blue"),
    ):
        axes.plot(positions[mask], p[mask], "o", ms=3, color=color, label=name)
    axes.set(yscale="log", xlabel="position", ylabel="attention probability")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.14), ncols=2, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def cache_bytes(sizes: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Plots the cache size per token, with one panel per model and one bar per variant.

    Args:
      sizes: bytes by name of the model and name of the variant.
    """
    figure = new_figure(8.0, 0.9 + 0.34 * max(map(len, sizes.values())))
    _bars(figure, sizes, "kB per token, all layers", 1e-3)
    figure.suptitle(title, fontsize=11)
    return figure


def decode_costs(costs: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Plots the costs of a decode step, with one panel per quantity and one bar per variant.

    Args:
      costs: numbers by name of the variant and name of the quantity, which includes the unit. All
        variants have the same quantities.
    """
    quantities = list(next(iter(costs.values())))
    figure = new_figure(2.4 * len(quantities) + 0.8, 0.9 + 0.34 * len(costs))
    panels = {
        quantity: {variant: cost[quantity] for variant, cost in costs.items()}
        for quantity in quantities
    }
    _bars(figure, panels)
    figure.suptitle(title, fontsize=11)
    return figure


def step_times(
    contexts: Sequence[int], milliseconds: Mapping[str, Sequence[float]], title: str = ""
) -> Figure:
    """Plots the time of a decode step over the number of cached tokens, with one line per variant
    and logarithmic axes.

    Args:
      contexts: numbers of cached tokens per sequence.
      milliseconds: times for these numbers, by name of the variant.
    """
    from matplotlib.ticker import NullFormatter

    figure, axes = new_axes(7.6, 4.2)
    # The legend lists the lines in the order of their right ends.
    for name, times in sorted(milliseconds.items(), key=lambda line: -line[1][-1]):
        axes.plot(contexts, times, "o-", ms=4, lw=1.4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="cached tokens per sequence", ylabel="ms per step")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    label_log_axis(axes.yaxis)
    axes.tick_params(which="minor", length=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.set_title(title, fontsize=11, loc="left")
    return figure


def _bars(
    figure: Figure, panels: Mapping[str, Mapping[str, float]], unit: str = "", factor: float = 1
) -> None:
    """Adds panels of horizontal bars, side by side. Each bar shows its value times ``factor``, and
    the first bar is on top."""
    subplots: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, bars) in zip(subplots, panels.items(), strict=True):
        values = [factor * value for value in bars.values()]
        patches = axes.barh(list(bars), values, color="tab:blue", height=0.62)
        axes.bar_label(patches, [_number(value) for value in values], padding=3, fontsize=9)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel(unit)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    subplots[0].invert_yaxis()  # the panels share the axis


def _number(value: float) -> str:
    """Formats a number with three significant digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
