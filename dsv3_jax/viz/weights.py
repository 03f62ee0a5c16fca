"""A checkpoint's figures: layers to the right, a line for each tensor kind.

Columns of panels are attention, feed-forward, and all else. MTP layers stand apart on a shaded
ground; what comes before the layers is left of them, what comes behind at the right end.
"""

from __future__ import annotations

import dataclasses
import math
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
Line = Mapping[int, T]
"""Place on the x axis -> the figures of all tensors of one kind there."""

_COLUMNS = ("attention", "feed-forward", "norms, router, embedding, head")
_DOTS = 16  # layers of a model up to which a line has a dot at each
_BEFORE, _BEHIND = "emb.", "head"
_BESIDE_LAYERS = 2  # the column that has these places


def weights(config: ModelConfig, figures: Mapping[str, ValueStats], title: str = "") -> Figure:
    """Largest and root mean square weight above, the range of scales below."""
    lines = _lines(config, figures, ValueStats())
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
            panels[1][0].set_ylabel("scales: smallest to largest")
    panels[0][0].set_ylabel("weights: largest (solid), rms (dotted)")
    _finish(panels)
    return figure


def weight_differences(
    config: ModelConfig, differences: Mapping[str, Difference], title: str = ""
) -> Figure:
    """Relative root mean square of the differences. Kinds of tensors that are equal in both
    checkpoints have no line and no place in the legend; each panel says how many they are."""
    figure, panels = _panels(config, 1, title)
    of_columns = _lines(config, differences, Difference())
    differing = [
        {kind: line for kind, line in lines.items() if any(d.squares for d in line.values())}
        for lines in of_columns
    ]
    for panel, lines in zip(panels[0], differing, strict=True):
        for pen in _pens(panel, config, lines):
            pen.draw(lambda d: d.relative_rms, label=True)
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("rms of the difference / rms of the first's weights")
    _finish(panels)
    for panel, lines, shown in zip(panels[0], of_columns, differing, strict=True):
        if equal := len(lines) - len(shown):
            said = f"{equal} of {len(lines)} kinds equal" if shown else "all values equal"
            panel.set_title(f"{panel.get_title()} ({said})")
    return figure


def _lines(
    config: ModelConfig, of_each: Mapping[str, T], none: T
) -> list[dict[str, dict[float, T]]]:
    """For each column kinds, and for each of their places on the x axis the sum of its tensors.

    An MTP layer continues the line of the layers' kind; its copies are left out.
    """
    own = {name: figures for name, figures in of_each.items() if name not in copies(config)}
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
        for layer, found in layers.items():
            beside = _BEFORE if kind == "embed_tokens" else _BEHIND
            line[_places(config)[beside if layer < 0 else layer]] = sum(found, none)
    return out


def _places(config: ModelConfig) -> dict[int | str, float]:
    """Where on the x axis each layer is, and what is before and behind them.

    What is no layer of the model proper takes more room, for marks side by side.
    """
    L, mtp = config.num_hidden_layers, config.num_nextn_predict_layers
    width = max(1.0, L / 8)
    beside = {L + k: L - 0.5 + (k + 0.5) * width for k in range(mtp)}
    ends = {_BEFORE: -0.5 - width / 2, _BEHIND: L - 0.5 + (mtp + 0.5) * width}
    return {layer: float(layer) for layer in range(L)} | beside | ends


@dataclasses.dataclass(frozen=True)
class _Pen(Generic[T]):
    """Draws one kind into one panel."""

    axes: Axes
    label: str
    color: Any
    line: dict[float, T]
    """Place -> figures."""
    layers: list[float]
    """Places that a line goes through."""
    beside: dict[float, float]
    """Other places, each with where in its room this kind's mark is."""
    dot: str | None

    def draw(self, value: Callable[[T], float | None], label: bool = False, **style: Any) -> None:
        """A line through the layers, a diamond at each other place. None is a gap."""
        style = {"color": self.color, "lw": 1.4} | style
        name = self.label if label else None
        heights = [_height(value(self.line[at])) for at in self.layers]
        self.axes.plot(self.layers, heights, marker=self.dot, ms=4, label=name, **style)
        heights = [_height(value(self.line[at])) for at in self.beside]
        style["ls"] = ""
        self.axes.plot([*self.beside.values()], heights, marker="D", ms=4.5, **style)


def _height(value: float | None) -> float:
    return math.nan if value is None else value


def _pens(axes: Axes, config: ModelConfig, lines: dict[str, dict[float, T]]) -> list[_Pen[T]]:
    places = _places(config)
    width = abs(places[_BEFORE] + 0.5) * 2
    dot = "o" if config.num_hidden_layers <= _DOTS else None
    pens = []
    for i, (kind, line) in enumerate(lines.items()):
        shift = ((i + 0.5) / len(lines) - 0.5) * 0.8 * width
        layers = sorted(at for at in line if 0 <= at < config.num_hidden_layers - 0.5)
        ends = (places[_BEFORE], places[_BEHIND])
        beside = {at: at + (0 if at in ends else shift) for at in sorted(line.keys() - layers)}
        pens.append(_Pen(axes, kind, _color(kind, list(lines)), line, layers, beside, dot))
    return pens


def _draw_scales(pen: _Pen[ValueStats]) -> None:
    """A band through the layers, a bar at each other place."""
    ranges = {at: figures.scales for at, figures in pen.line.items() if figures.scales}
    layers = [at for at in pen.layers if at in ranges]
    low, high = ([ranges[at][side] for at in layers] for side in (0, 1))
    pen.axes.fill_between(layers, low, high, color=pen.color, alpha=0.1, lw=0)
    for edge in (low, high):
        pen.axes.plot(layers, edge, color=pen.color, lw=1.2, marker=pen.dot, ms=3)
    for at in ranges.keys() & pen.beside.keys():
        there = [pen.beside[at]] * 2
        pen.axes.plot(there, ranges[at], color=pen.color, lw=2, marker="_", ms=5, mew=2)


def _panels(config: ModelConfig, rows: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    """Rows of empty panels, with the places on their x axes; the last row is for legends."""
    legends = 1.0 if rows > 1 else 1.6
    figure = new_figure(16, 1 + 4.2 * rows + legends)
    from matplotlib.ticker import MaxNLocator

    figure.suptitle(title, fontsize="x-large")
    heights = [4.0] * rows + [legends]
    panels = figure.subplots(rows + 1, len(_COLUMNS), sharey="row", height_ratios=heights)
    places, L = _places(config), config.num_hidden_layers
    for (_, column), axes in np.ndenumerate(panels[:rows]):
        axes.margins(y=0.12)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True)
        layers = [int(at) for at in MaxNLocator(10, integer=True).tick_values(0, L - 1)]
        shown: list[int | str] = [at for at in layers if 0 <= at < L]
        mtp = [at for at in places if isinstance(at, int) and at >= L]
        if column == _BESIDE_LAYERS:
            shown = [_BEFORE, *shown, _BEHIND]
            axes.set_xlim(1.5 * places[_BEFORE], places[_BEHIND] - places[_BEFORE] / 2)
        else:
            axes.set_xlim(-0.5, places[_BEHIND] + places[_BEFORE] + 0.5)
        shown += mtp
        axes.set_xticks([places[at] for at in shown], [str(at) for at in shown])
        if mtp:
            end = places[_BEHIND] + places[_BEFORE] + 0.5
            axes.axvspan(L - 0.5, end, color="0.5", alpha=0.13, lw=0)
            top = axes.get_xaxis_transform()
            axes.text((L - 0.5 + end) / 2, 0.985, "MTP", transform=top, ha="center", va="top")
    return figure, panels.tolist()


def _finish(panels: list[list[Axes]]) -> None:
    """Titles, legends in the last row or above it where a panel is empty."""
    for column, title in enumerate(_COLUMNS):
        *drawn, last = (row[column] for row in panels)
        last.set_axis_off()
        drawn[0].set_title(title)
        place = next((axes for axes in drawn if not axes.get_visible()), last)
        if place is not last:
            place.set_visible(True)
            place.set_axis_off()
            for artist in [*place.lines, *place.patches, *place.texts]:
                artist.remove()
        next(a for a in reversed(drawn) if a is not place).set_xlabel("layer")
        lines, kinds = drawn[0].get_legend_handles_labels()
        columns = 2 if column == _BESIDE_LAYERS else 3
        style = {"frameon": False, "fontsize": "small", "columnspacing": 1.0}
        if not lines:
            continue
        legend = place.legend(lines, kinds, loc="upper center", ncols=columns, **style)
        legend.set_in_layout(False)  # or it would widen its column


def _color(kind: str, kinds: list[str]) -> Any:
    """Three shades for each feed-forward network, else a colour a kind."""
    from matplotlib import colormaps

    *network, projection = kind.split(".")
    shades = ("gate_proj", "up_proj", "down_proj")
    if projection in shades:
        family = ([], ["experts"], ["shared_experts"]).index(network)
        return colormaps["tab20c"]((8, 0, 4)[family] + shades.index(projection))
    return colormaps["tab10" if len(kinds) <= 10 else "tab20"](kinds.index(kind))
