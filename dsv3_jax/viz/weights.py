"""Plots of checkpoints: statistics of each tensor over layers, with one line per kind of tensor.

The three columns of panels are attention, feed-forward networks, and all other tensors. MTP layers
have a shaded background. The embedding is to the left of the layers, and the head and its norm are
to the right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from dsv3_jax.checkpoint.compare import Difference
from dsv3_jax.checkpoint.open_checkpoint import group_by_kind
from dsv3_jax.checkpoint.tensor_table import copies
from dsv3_jax.checkpoint.verify import ValueStats
from dsv3_jax.config import ModelConfig
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T", ValueStats, Difference)
_COLUMNS = ("attention", "feed-forward", "norms, router, embedding, head")
_MAX_DOTS = 16  # number of layers up to which a line has a dot at each of them
_EMBEDDING, _HEAD = "emb.", "head"
_OTHER = 2  # the column with embedding and head


def weights(config: ModelConfig, stats: Mapping[str, ValueStats], title: str = "") -> Figure:
    """Plots the largest absolute weight and the root mean square of the weights, and below them the
    range of the scales of quantised weights.

    Args:
      stats: statistics of the values of each tensor, by name.
    """
    lines = _lines(config, stats, ValueStats())
    scaled = [any(f.scales for line in c.values() for f in line.values()) for c in lines]
    figure, panels = _panels(config, 2 if any(scaled) else 1, title)
    for column, above in enumerate(panels[0]):
        for pen in _pens(above, config, lines[column]):
            pen.draw(lambda f: f.largest or None, label=True)
            pen.draw(lambda f: f.rms or None, ls=":", mfc="white")
        above.set(yscale="log")
        if any(scaled):
            below = panels[1][column]
            below.set(yscale="log")
            below.set_visible(scaled[column])
            for pen in _pens(below, config, lines[column]):
                _draw_scales(pen)
            panels[1][0].set_ylabel("scales (minimum to maximum)")
    panels[0][0].set_ylabel("weights: max. magnitude (solid), rms (dotted)")
    _finish(panels)
    return figure


def weight_differences(
    config: ModelConfig, differences: Mapping[str, Difference], title: str = ""
) -> Figure:
    """Plots the relative root mean square difference between two checkpoints. Kinds of tensors that
    are equal in both have no line; the title of each panel gives their number.

    Args:
      differences: differences by name of the tensor.
    """
    figure, panels = _panels(config, 1, title)
    columns = _lines(config, differences, Difference())
    differing = [
        {kind: line for kind, line in lines.items() if any(d.squares for d in line.values())}
        for lines in columns
    ]
    for panel, lines in zip(panels[0], differing, strict=True):
        for pen in _pens(panel, config, lines):
            pen.draw(lambda d: d.relative_rms, label=True)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("rms difference / rms of the first checkpoint")
    _finish(panels)
    for panel, lines, shown in zip(panels[0], columns, differing, strict=True):
        if equal := len(lines) - len(shown):
            note = f"{equal} of {len(lines)} kinds equal" if shown else "all values equal"
            panel.set_title(f"{panel.get_title()} ({note})")
    return figure


def _lines(
    config: ModelConfig, tensors: Mapping[str, T], empty: T
) -> list[dict[str, dict[float, T]]]:
    """Returns the lines of each column, by kind of tensor. A line has, by x position, the sum of
    the statistics of all tensors there.

    Tensors of an MTP layer belong to the line of the same kind in the main model. Its copies of the
    embedding and the head are left out.
    """
    own = {name: stats for name, stats in tensors.items() if name not in copies(config)}
    out: list[dict[str, dict[float, T]]] = [{} for _ in _COLUMNS]
    for kind, layers in group_by_kind(config, own).items():
        short = kind.removeprefix("layers.").removeprefix("mtp.")
        short = short.removeprefix("self_attn.").removeprefix("mlp.")
        if "norm" in kind or kind.endswith("eh_proj"):
            column = 2
        elif ".self_attn." in kind:
            column = 0
        else:
            column = 1 if kind.endswith(("gate_proj", "up_proj", "down_proj")) else 2
        line = out[column].setdefault(short, {})
        for layer, layer_stats in layers.items():
            end = _EMBEDDING if kind == "embed_tokens" else _HEAD
            line[_positions(config)[end if layer < 0 else layer]] = sum(layer_stats, empty)
    return out


def _positions(config: ModelConfig) -> dict[int | str, float]:
    """Returns the x position of each layer, of the embedding and of the head.

    MTP layers, embedding and head are wider than the other layers, so that the marks of several
    kinds fit side by side.
    """
    L, mtp = config.num_hidden_layers, config.num_nextn_predict_layers
    width = max(1.0, L / 8)
    mtp_layers = {L + k: L - 0.5 + (k + 0.5) * width for k in range(mtp)}
    ends = {_EMBEDDING: -0.5 - width / 2, _HEAD: L - 0.5 + (mtp + 0.5) * width}
    return {layer: float(layer) for layer in range(L)} | mtp_layers | ends


@dataclasses.dataclass(frozen=True)
class _Pen(Generic[T]):
    """Draws the line of one kind of tensor into a panel."""

    axes: Axes
    label: str
    color: Any
    line: dict[float, T]  # statistics or differences by x position
    layers: list[float]  # x positions of the layers, which the line connects
    others: dict[float, float]
    """x positions of MTP layers, embedding and head, each with the x position of this kind's
    mark."""
    dot: str | None  # marker at each layer, or None

    def draw(self, value: Callable[[T], float | None], label: bool = False, **style: Any) -> None:
        """Draws a line through the layers and a diamond at each other position. A value of None
        leaves a gap."""
        style = {"color": self.color, "lw": 1.4} | style
        name = self.label if label else None
        heights = np.array([value(self.line[x]) for x in self.layers], float)  # None becomes NaN
        self.axes.plot(self.layers, heights, marker=self.dot, ms=4, label=name, **style)
        heights = np.array([value(self.line[x]) for x in self.others], float)
        style["ls"] = ""
        self.axes.plot([*self.others.values()], heights, marker="D", ms=4.5, **style)


def _pens(axes: Axes, config: ModelConfig, lines: dict[str, dict[float, T]]) -> list[_Pen[T]]:
    positions = _positions(config)
    width = abs(positions[_EMBEDDING] + 0.5) * 2
    dot = "o" if config.num_hidden_layers <= _MAX_DOTS else None
    pens = []
    for i, (kind, line) in enumerate(lines.items()):
        shift = ((i + 0.5) / len(lines) - 0.5) * 0.8 * width
        layers = sorted(x for x in line if 0 <= x < config.num_hidden_layers - 0.5)
        ends = (positions[_EMBEDDING], positions[_HEAD])
        others = {x: x + (0 if x in ends else shift) for x in sorted(line.keys() - layers)}
        pens.append(_Pen(axes, kind, _color(kind, list(lines)), line, layers, others, dot))
    return pens


def _draw_scales(pen: _Pen[ValueStats]) -> None:
    """Draws the range of scales as a band through the layers and as a bar at each other
    position."""
    ranges = {x: stats.scales for x, stats in pen.line.items() if stats.scales}
    layers = [x for x in pen.layers if x in ranges]
    low, high = ([ranges[x][side] for x in layers] for side in (0, 1))
    pen.axes.fill_between(layers, low, high, color=pen.color, alpha=0.1, lw=0)
    for edge in (low, high):
        pen.axes.plot(layers, edge, color=pen.color, lw=1.2, marker=pen.dot, ms=3)
    for x in ranges.keys() & pen.others.keys():
        mark_x = [pen.others[x]] * 2
        pen.axes.plot(mark_x, ranges[x], color=pen.color, lw=2, marker="_", ms=5, mew=2)


def _panels(config: ModelConfig, rows: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    """Returns a figure with ``rows`` rows of empty panels, with layers on the x axes, and a last
    row for the legends."""
    legends = 1.0 if rows > 1 else 1.6
    figure = new_figure(16, 1 + 4.2 * rows + legends)
    from matplotlib.ticker import MaxNLocator

    figure.suptitle(title, fontsize="x-large")
    heights = [4.0] * rows + [legends]
    panels = figure.subplots(rows + 1, len(_COLUMNS), sharey="row", height_ratios=heights)
    positions, L = _positions(config), config.num_hidden_layers
    for (_, column), axes in np.ndenumerate(panels[:rows]):
        axes.margins(y=0.12)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True)
        layers = [int(tick) for tick in MaxNLocator(10, integer=True).tick_values(0, L - 1)]
        ticks: list[int | str] = [layer for layer in layers if 0 <= layer < L]
        mtp = [layer for layer in positions if isinstance(layer, int) and layer >= L]
        if column == _OTHER:
            ticks = [_EMBEDDING, *ticks, _HEAD]
            axes.set_xlim(1.5 * positions[_EMBEDDING], positions[_HEAD] - positions[_EMBEDDING] / 2)
        else:
            axes.set_xlim(-0.5, positions[_HEAD] + positions[_EMBEDDING] + 0.5)
        ticks += mtp
        axes.set_xticks([positions[tick] for tick in ticks], [str(tick) for tick in ticks])
        if mtp:
            end = positions[_HEAD] + positions[_EMBEDDING] + 0.5
            axes.axvspan(L - 0.5, end, color="0.5", alpha=0.13, lw=0)
            top = axes.get_xaxis_transform()
            axes.text((L - 0.5 + end) / 2, 0.985, "MTP", transform=top, ha="center", va="top")
    return figure, panels.tolist()


def _finish(panels: list[list[Axes]]) -> None:
    """Adds titles, axis labels and legends. A legend goes to the last row, or to an unused panel
    above it."""
    for column, title in enumerate(_COLUMNS):
        *plots, last = (row[column] for row in panels)
        last.set_axis_off()
        plots[0].set_title(title)
        legend_axes = next((axes for axes in plots if not axes.get_visible()), last)
        if legend_axes is not last:
            legend_axes.set_visible(True)
            legend_axes.set_axis_off()
            for artist in [*legend_axes.lines, *legend_axes.patches, *legend_axes.texts]:
                artist.remove()
        next(axes for axes in reversed(plots) if axes is not legend_axes).set_xlabel("layer")
        lines, kinds = plots[0].get_legend_handles_labels()
        columns = 2 if column == _OTHER else 3
        style = {"frameon": False, "fontsize": "small", "columnspacing": 1.0}
        if not lines:
            continue
        legend = legend_axes.legend(lines, kinds, loc="upper center", ncols=columns, **style)
        legend.set_in_layout(False)  # otherwise it would widen its column


def _color(kind: str, kinds: list[str]) -> Any:
    """Returns the colour of a kind: three shades per feed-forward network, and one colour per other
    kind."""
    from matplotlib import colormaps

    *network, projection = kind.split(".")
    shades = ("gate_proj", "up_proj", "down_proj")
    if projection in shades:
        family = ([], ["experts"], ["shared_experts"]).index(network)
        return colormaps["tab20c"]((8, 0, 4)[family] + shades.index(projection))
    return colormaps["tab10" if len(kinds) <= 10 else "tab20"](kinds.index(kind))
