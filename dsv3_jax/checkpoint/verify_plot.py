"""Pictures of a checkpoint's figures: layers to the right, a line for each tensor kind.

Columns of panels are attention, feed-forward, and all else. MTP layers stand apart on a shaded
ground; what comes before the layers is left of them, what comes behind at the right end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dsv3_jax.checkpoint.compare import Difference
from dsv3_jax.checkpoint.names import copies
from dsv3_jax.checkpoint.opened import by_kind
from dsv3_jax.checkpoint.verify import Figures
from dsv3_jax.config import ModelConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T", Figures, Difference)
Line = Mapping[int, T]
"""Place on the x axis -> the figures of all tensors of one kind there."""

_DPI = 130
_COLUMNS = ("attention", "feed-forward", "norms, router, embedding, head")
_DOTS = 16  # layers up to which a line has a dot at each


def plot_figures(
    config: ModelConfig, figures: Mapping[str, Figures], path: Path, title: str = ""
) -> None:
    """Largest and root mean square weight above, the range of scales below. Needs matplotlib."""
    lines = _lines(config, figures, Figures())
    scaled = [any(f.scales for line in c.values() for f in line.values()) for c in lines]
    figure, panels = _panels(2 if any(scaled) else 1, title)
    for column, above in enumerate(panels[0]):
        for kind, line in lines[column].items():
            color = _color(kind, list(lines[column]))
            _draw(above, config, line, lambda f: f.largest or math.nan, color, label=kind)
            _draw(above, config, line, lambda f: f.rms or math.nan, color, ls=":", fill=False)
        above.set(yscale="log")
        if not any(scaled):
            continue
        below = panels[1][column]
        below.set(yscale="log")
        below.set_visible(scaled[column])
        for kind, line in lines[column].items():
            _draw_scales(below, config, line, _color(kind, list(lines[column])))
    panels[0][0].set_ylabel("weights: largest (solid), rms (dotted)")
    panels[-1][0].set_ylabel("scales: smallest to largest" if any(scaled) else "")
    _finish(figure, panels, config, path)


def plot_differences(
    config: ModelConfig, differences: Mapping[str, Difference], path: Path, title: str = ""
) -> None:
    """Relative root mean square of the differences. Needs matplotlib."""
    lines = _lines(config, differences, Difference())
    figure, panels = _panels(1, title)
    for panel, of_column in zip(panels[0], lines, strict=True):
        for kind, line in of_column.items():
            color = _color(kind, list(of_column))
            _draw(panel, config, line, _relative, color, label=kind)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("rms of the difference / rms of the first's weights")
    _finish(figure, panels, config, path)


def _relative(difference: Difference) -> float:
    relative = difference.relative_rms
    return math.nan if relative is None else relative


def _lines(config: ModelConfig, of_each: Mapping[str, T], none: T) -> list[dict[str, dict[int, T]]]:
    """For each column a line a kind. A place is a layer, or an end of the axis.

    An MTP layer continues the line of the layers' kind; its copies are left out.
    """
    own = {name: figures for name, figures in of_each.items() if name not in copies(config)}
    out: list[dict[str, dict[int, T]]] = [{} for _ in _COLUMNS]
    for kind, layers in by_kind(config, own).items():
        short = kind.removeprefix("layers.").removeprefix("mtp.")
        short = short.removeprefix("self_attn.").removeprefix("mlp.")
        if "norm" in kind or kind.endswith("eh_proj"):
            column = 2
        elif ".self_attn." in kind:
            column = 0
        else:
            column = 1 if kind.endswith(("gate_proj", "up_proj", "down_proj")) else 2
        end = -1 if kind == "embed_tokens" else _layers(config)
        sums = {end if at < 0 else at: sum(found, none) for at, found in layers.items()}
        out[column].setdefault(short, {}).update(sums)
    return out


def _panels(rows: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure  # an extra: nothing else needs it

    figure = Figure(figsize=(16, 2 + 4 * rows), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(rows, len(_COLUMNS), sharex=True, sharey="row", squeeze=False)
    return figure, [list(row) for row in panels]


def _layers(config: ModelConfig) -> int:
    return config.num_hidden_layers + config.num_nextn_predict_layers


def _draw(
    axes: Axes,
    config: ModelConfig,
    line: Line[T],
    value: Callable[[T], float],
    color: Any,
    *,
    label: str | None = None,
    ls: str = "-",
    fill: bool = True,
) -> None:
    """A line through the layers, a diamond for each MTP layer and what is in no layer."""
    layers = [at for at in sorted(line) if 0 <= at < config.num_hidden_layers]
    alone = [at for at in sorted(line) if at not in layers]
    dot = "o" if len(layers) <= _DOTS else None
    face = color if fill else "white"
    style = {"color": color, "ls": ls, "lw": 1.4, "ms": 3.5, "mfc": face}
    axes.plot(layers, [value(line[at]) for at in layers], marker=dot, label=label, **style)
    style |= {"ls": "", "ms": 5.5}
    axes.plot(alone, [value(line[at]) for at in alone], marker="D", **style)


def _draw_scales(axes: Axes, config: ModelConfig, line: Line[Figures], color: Any) -> None:
    ranges = {at: figures.scales for at, figures in sorted(line.items()) if figures.scales}
    layers = [at for at in ranges if at < config.num_hidden_layers]
    low, high = ([ranges[at][side] for at in layers] for side in (0, 1))
    axes.fill_between(layers, low, high, color=color, alpha=0.12, lw=0)
    dot = "o" if len(layers) <= _DOTS else None
    for edge in (low, high):
        axes.plot(layers, edge, color=color, lw=1.2, marker=dot, ms=3)
    for at in ranges.keys() - layers:
        axes.plot([at, at], ranges[at], color=color, lw=1.2, marker="D", ms=4.5)


def _finish(figure: Figure, panels: list[list[Axes]], config: ModelConfig, path: Path) -> None:
    """Axes, legends and the marks of MTP layers; then the file."""
    from matplotlib.ticker import MaxNLocator

    first, end = config.num_hidden_layers, _layers(config)
    for row in panels:
        for column, axes in enumerate(row):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(-1.5, end + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
            if end > first:
                axes.axvspan(first - 0.5, end - 0.5, color="0.5", alpha=0.15, lw=0)
                top = axes.get_xaxis_transform()
                axes.text((first + end - 1) / 2, 0.98, "MTP", transform=top, ha="center", va="top")
            below = row is panels[-1] or not panels[-1][column].get_visible()
            axes.tick_params(labelbottom=below)
            axes.set_xlabel("layer" if below else "")
    for column, axes in enumerate(panels[0]):
        axes.set_title(_COLUMNS[column])
        lines, kinds = axes.get_legend_handles_labels()
        under = next(row[column] for row in reversed(panels) if row[column].get_visible())
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 3}
        under.legend(lines, kinds, frameon=False, fontsize="small", **place)
    figure.savefig(path, dpi=_DPI)


def _color(kind: str, kinds: list[str]) -> Any:
    """Three shades for each feed-forward network, else a colour a kind."""
    from matplotlib import colormaps

    *network, projection = kind.split(".")
    shades = ("gate_proj", "up_proj", "down_proj")
    if projection in shades:
        family = ([], ["experts"], ["shared_experts"]).index(network)
        return colormaps["tab20c"]((8, 0, 4)[family] + shades.index(projection))
    return colormaps["tab10" if len(kinds) <= 10 else "tab20"](kinds.index(kind))
