"""Pictures of latent attention: where it looks, and what its variants hold, read and compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dsv3_jax.viz.canvas import new_figure, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_forms(
    forms: Mapping[str, npt.ArrayLike], words: Sequence[str], title: str = ""
) -> Figure:
    """Where one query looks, a row of squares a head, as several forms of attention compute it.

    Args:
      forms: probabilities [H, S] of each, by its name.
      words: the S cached tokens.

    Raises:
      ValueError: a form that is not [H, S].
    """
    arrays = {name: np.asarray(values) for name, values in forms.items()}
    for name, values in arrays.items():
        if values.ndim != 2 or values.shape[1] != len(words):
            raise ValueError(f"{name}: expected [heads, {len(words)}], got {list(values.shape)}")
    heads = len(next(iter(arrays.values())))
    height = 0.24 * heads + 0.5
    figure = new_figure(max(6.0, 0.3 * len(words) + 1.5), height * len(arrays) + 1.2)
    panels: Any = figure.subplots(len(arrays), 1, sharex=True, squeeze=False)[:, 0]
    brightest = max(float(values.max()) for values in arrays.values())
    for axes, (name, values) in zip(panels, arrays.items(), strict=True):
        axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=brightest)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_yticks(range(heads), [f"head {h}" for h in range(heads)], fontsize=8)
        axes.tick_params(length=0)
    shown = [visible(word) for word in words]
    panels[-1].set_xticks(range(len(words)), shown, rotation=90, fontsize=8)
    figure.colorbar(panels[0].images[0], ax=list(panels), label="probability", shrink=0.8)
    figure.suptitle(title, fontsize=11)
    return figure


def cache_bytes(sizes: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Bars of bytes a token in the cache: a panel a model, a bar a way to cache.

    Args:
      sizes: by the names of the models, bytes by the names of the ways.
    """
    figure = new_figure(8.0, 0.9 + 0.34 * max(map(len, sizes.values())))
    _bars(figure, sizes, "kB a token, all layers", 1e-3)
    figure.suptitle(title, fontsize=11)
    return figure


def decode_costs(costs: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Bars of what a decode step costs: a panel a quantity, a bar a variant.

    Args:
      costs: by the names of the variants, numbers by the names of the quantities, units in them;
        all variants have the same quantities.
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
    """Lines of a step's time over the cached tokens, one a variant, both axes logarithmic.

    Args:
      milliseconds: by the names of the variants, one a context.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = new_figure(7.6, 4.2)
    axes: Any = figure.subplots()
    # The legend has the order of the lines' ends.
    for name, times in sorted(milliseconds.items(), key=lambda line: -line[1][-1]):
        axes.plot(contexts, times, "o-", ms=4, lw=1.4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="cached tokens a row", ylabel="ms a step")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.set_title(title, fontsize=11, loc="left")
    return figure


def _bars(
    figure: Figure, panels: Mapping[str, Mapping[str, float]], unit: str = "", factor: float = 1
) -> None:
    """A panel a name, side by side; bars across, the first on top, each with its number behind it,
    times ``factor``."""
    subplots: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, bars) in zip(subplots, panels.items(), strict=True):
        values = [factor * value for value in bars.values()]
        drawn = axes.barh(list(bars), values, color="tab:blue", height=0.62)
        axes.bar_label(drawn, [_number(value) for value in values], padding=3, fontsize=9)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel(unit)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    subplots[0].invert_yaxis()  # shared by all


def _number(value: float) -> str:
    """Three digits, or the whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
