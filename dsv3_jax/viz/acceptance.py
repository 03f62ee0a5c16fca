"""Drafts: how many hold, by their place in a step, by depth, by what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Integer

from dsv3_jax.viz.canvas import new_figure, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart by all kinds of colour vision and in grey: blue, and hatched light orange.
_ACCEPTED: dict[str, Any] = {"color": "#7fb2e0"}
_REFUSED: dict[str, Any] = {
    "facecolor": "#fbe3c8",
    "edgecolor": "#c07a2c",
    "hatch": "///",
    "linewidth": 0,
}
_SHADE = "#bcd9f2"  # behind letters


def acceptance_by_place(acceptance: Mapping[str, Sequence[float]]) -> Figure:
    """Share of the drafts at each place of a step that became tokens, a line for each series.

    Args:
      acceptance: as :attr:`Speculation.acceptance` gives it, by name.
    """
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    deepest = max(map(len, acceptance.values()))
    for name, values in acceptance.items():
        axes.plot(range(1, len(values) + 1), values, "o-", label=name)
    axes.set(
        xlabel="position of the draft in its step",
        ylabel="share of drafts accepted",
        ylim=(0, 1),
    )
    axes.set_xticks(range(1, deepest + 1))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def gain_by_depth(
    depths: Sequence[int], accept_length: Sequence[float], tokens_per_second: Sequence[float]
) -> Figure:
    """Tokens a step beside all that a step could give, and the speed that comes of it; depth 0 is
    without drafts."""
    figure = new_figure(9, 3.6)
    steps, speed = figure.subplots(1, 2)
    steps.plot(depths, [d + 1 for d in depths], ":", color="0.4", label="all drafts accepted")
    steps.plot(depths, accept_length, "o-", color="#1f5f99", label="measured")
    steps.set(xlabel="depth", ylabel="tokens per step", ylim=(0, None))
    steps.legend()
    speed.bar(depths, tokens_per_second, 0.6, color="#8cb0d6")
    for depth, value in zip(depths, tokens_per_second, strict=True):
        ratio = value / tokens_per_second[0]
        speed.annotate(
            f"{ratio:.2f}x", (depth, value), (0, 2), textcoords="offset points", ha="center"
        )
    speed.set(xlabel="depth", ylabel="tokens per second", title="on this machine")
    speed.margins(y=0.12)
    steps.set_title("what a step gives")
    for axes in (steps, speed):
        axes.set_xticks(depths)
        axes.grid(alpha=0.3, axis="y")
    return figure


def acceptance_by_class(
    classes: Sequence[str], accepted: Integer[np.ndarray, " C"], drafted: Integer[np.ndarray, " C"]
) -> Figure:
    """A bar for each of C classes of tokens, the best first, with its number of drafts and its 95 %
    interval (Wilson's)."""
    share = accepted / np.maximum(drafted, 1)
    order = np.argsort(share)
    low, high = _wilson(accepted[order], drafted[order])
    figure = new_figure(7, 1.2 + 0.42 * len(classes))
    axes = figure.subplots()
    y = np.arange(len(classes))
    axes.barh(y, share[order], 0.7, label="accepted", **_ACCEPTED)
    axes.barh(y, 1 - share[order], 0.7, left=share[order], label="refused", **_REFUSED)
    axes.hlines(y, low, high, color="0.15", lw=1.5, label="95 % interval")
    for at, i in enumerate(order):
        axes.annotate(f"{share[i]:.0%}", (0, at), (4, 0), textcoords="offset points", va="center")
    names = [f"{classes[i]}\n{drafted[i]:,} drafts" for i in order]
    axes.set_yticks(y, names)
    axes.set(xlim=(0, 1), xlabel="share of drafts")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def drafted_text(steps: Sequence[Sequence[str]], prompt: str = "") -> Figure:
    """Text as it was written, in a fixed pitch, with accepted drafts shaded.

    Args:
      steps: the tokens' texts of each decode step, the model's own last.
    """
    from matplotlib.patches import Rectangle

    spans = [(prompt, False)]
    spans += [(text, i < len(step) - 1) for step in steps for i, text in enumerate(step)]
    boxes, line, column = [], 0, 0
    for text, drafted in spans:
        for i, part in enumerate(text.split("\n")):
            if i:
                line, column = line + 1, 0
            boxes.append((line, column, part, drafted))
            column += len(part)
    wide = max(at + len(part) for _, at, part, _ in boxes)
    figure = new_figure(0.1 * max(wide, 40) + 0.3, 0.2 * (line + 1) + 0.3)
    axes = figure.subplots()
    axes.set(xlim=(0, max(wide, 40)), ylim=(line + 1, 0))
    axes.set_axis_off()
    for at, start, part, drafted in boxes:
        if drafted and part:
            axes.add_patch(
                Rectangle((start + 0.06, at + 0.06), len(part) - 0.12, 0.88, color=_SHADE)
            )
        for i, letter in enumerate(part):
            axes.text(
                start + i + 0.5,
                at + 0.5,
                letter,
                family="monospace",
                fontsize=9,
                ha="center",
                va="center",
                parse_math=False,
            )
    return figure


def frequencies(
    tokens: Sequence[str], probability: Sequence[float], drawn: Mapping[str, Sequence[float]]
) -> Figure:
    """The model's probabilities of tokens beside the shares they had in each way to draw."""
    figure = new_figure(1.5 + 0.62 * len(tokens), 3.4)
    axes = figure.subplots()
    x, width = np.arange(len(tokens)), 0.8 / len(drawn)
    for i, (name, values) in enumerate(drawn.items()):
        axes.bar(x + (i - (len(drawn) - 1) / 2) * width, values, width * 0.95, label=name)
    axes.hlines(probability, x - 0.45, x + 0.45, color="black", lw=1.5, label="the model says")
    axes.set_xticks(
        x,
        [visible(t) for t in tokens],
        rotation=45,
        ha="right",
        family="monospace",
        parse_math=False,
    )
    axes.set(ylabel="share of the draws")
    axes.legend()
    return figure


def _wilson(
    accepted: Integer[np.ndarray, " C"], drafted: Integer[np.ndarray, " C"]
) -> tuple[np.ndarray, np.ndarray]:
    z, n = 1.96, np.maximum(drafted, 1)
    p = accepted / n
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return middle - half, middle + half
