"""Plots of speculative decoding: acceptance rates, speedup and sampled frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Integer

from dsv3_jax.viz.canvas import new_axes, new_figure, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Distinguishable with every kind of colour vision and in grey.
_ACCEPTED: dict[str, Any] = {"color": "#7fb2e0"}
_REJECTED: dict[str, Any] = {"facecolor": "#fbe3c8", "edgecolor": "#c07a2c"}
_REJECTED |= {"hatch": "///", "linewidth": 0}
_SHADE = "#bcd9f2"  # background of accepted drafts in text


def acceptance_by_position(acceptance: Mapping[str, Sequence[float]]) -> Figure:
    """Plots the acceptance rate of drafts by their position in a decode step, with one line per
    series.

    Args:
      acceptance: rates as in :attr:`Speculation.acceptance`, by name of the series.
    """
    figure, axes = new_axes(6, 3.6)
    deepest = max(map(len, acceptance.values()))
    for name, values in acceptance.items():
        axes.plot(range(1, len(values) + 1), values, "o-", label=name)
    axes.set(xlabel="position of the draft in its step", ylabel="acceptance rate", ylim=(0, 1))
    axes.set_xticks(range(1, deepest + 1))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def gain_by_depth(
    depths: Sequence[int], accept_length: Sequence[float], tokens_per_second: Sequence[float]
) -> Figure:
    """Plots tokens per step, with the maximum that a step could give, and tokens per second.

    Args:
      depths: draft depths; the first is the baseline of the speedup. Depth 0 is without
        speculation.
      accept_length: mean number of tokens per step.
      tokens_per_second: measured throughput.
    """
    figure = new_figure(9, 3.6)
    steps, speed = figure.subplots(1, 2)
    steps.plot(depths, [d + 1 for d in depths], ":", color="0.4", label="all drafts accepted")
    steps.plot(depths, accept_length, "o-", color="#1f5f99", label="measured")
    steps.set(xlabel="draft depth", ylabel="tokens per step", ylim=(0, None))
    steps.legend()
    speed.bar(depths, tokens_per_second, 0.6, color="#8cb0d6")
    for depth, value in zip(depths, tokens_per_second, strict=True):
        ratio = value / tokens_per_second[0]
        speed.annotate(
            f"{ratio:.2f}x", (depth, value), (0, 2), textcoords="offset points", ha="center"
        )
    speed.set(xlabel="draft depth", ylabel="tokens per second", title="throughput on this machine")
    speed.margins(y=0.12)
    for axes in (steps, speed):
        axes.set_xticks(depths)
        axes.grid(alpha=0.3, axis="y")
    return figure


def acceptance_by_class(
    classes: Sequence[str], accepted: Integer[np.ndarray, " C"], drafted: Integer[np.ndarray, " C"]
) -> Figure:
    """Plots the acceptance rate of each of C classes of tokens, in descending order, with its
    number of drafts and its 95% Wilson interval."""
    rate = accepted / np.maximum(drafted, 1)
    order = np.argsort(rate)
    low, high = _wilson(accepted[order], drafted[order])
    figure, axes = new_axes(7, 1.2 + 0.42 * len(classes))
    y = np.arange(len(classes))
    axes.barh(y, rate[order], 0.7, label="accepted", **_ACCEPTED)
    axes.barh(y, 1 - rate[order], 0.7, left=rate[order], label="rejected", **_REJECTED)
    axes.hlines(y, low, high, color="0.15", lw=1.5, label="95% interval")
    for bar, i in enumerate(order):
        axes.annotate(f"{rate[i]:.0%}", (0, bar), (4, 0), textcoords="offset points", va="center")
    names = [f"{classes[i]}\n{drafted[i]:,} drafts" for i in order]
    axes.set_yticks(y, names)
    axes.set(xlim=(0, 1), xlabel="fraction of drafts")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def drafted_text(steps: Sequence[Sequence[str]], prompt: str = "") -> Figure:
    """Shows generated text in a fixed pitch, with accepted drafts shaded.

    Args:
      steps: texts of the tokens of each decode step: accepted drafts, then the model's own token.
      prompt: text before the generated text, which is not shaded.
    """
    from matplotlib.patches import Rectangle

    spans = [(prompt, False)]
    spans += [(text, i < len(step) - 1) for step in steps for i, text in enumerate(step)]
    pieces, line, column = [], 0, 0
    for text, is_draft in spans:
        for i, piece in enumerate(text.split("\n")):
            if i:
                line, column = line + 1, 0
            pieces.append((line, column, piece, is_draft))
            column += len(piece)
    width = max(40, *(start + len(piece) for _, start, piece, _ in pieces))
    figure, axes = new_axes(0.1 * width + 0.3, 0.2 * (line + 1) + 0.3)
    axes.set(xlim=(0, width), ylim=(line + 1, 0))
    axes.set_axis_off()
    for row, start, piece, is_draft in pieces:
        if is_draft and piece:
            axes.add_patch(
                Rectangle((start + 0.06, row + 0.06), len(piece) - 0.12, 0.88, color=_SHADE)
            )
        for i, letter in enumerate(piece):
            style = {"family": "monospace", "fontsize": 9, "ha": "center", "va": "center"}
            axes.text(start + i + 0.5, row + 0.5, letter, parse_math=False, **style)
    return figure


def frequencies(
    tokens: Sequence[str], probability: Sequence[float], sampled: Mapping[str, Sequence[float]]
) -> Figure:
    """Plots the frequencies of sampled tokens, with the model's probabilities as lines.

    Args:
      tokens: texts of the tokens.
      probability: the model's probability of each token.
      sampled: relative frequency of each token, by name of the sampling method.
    """
    figure, axes = new_axes(1.5 + 0.62 * len(tokens), 3.4)
    x, width = np.arange(len(tokens)), 0.8 / len(sampled)
    for i, (name, values) in enumerate(sampled.items()):
        axes.bar(x + (i - (len(sampled) - 1) / 2) * width, values, width * 0.95, label=name)
    axes.hlines(probability, x - 0.45, x + 0.45, color="black", lw=1.5, label="model probability")
    style = {"rotation": 45, "ha": "right", "family": "monospace", "parse_math": False}
    axes.set_xticks(x, [visible(t) for t in tokens], **style)
    axes.set(ylabel="relative frequency")
    axes.legend()
    return figure


def _wilson(
    accepted: Integer[np.ndarray, " C"], drafted: Integer[np.ndarray, " C"]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of the 95% Wilson intervals of acceptance rates."""
    z, n = 1.96, np.maximum(drafted, 1)
    p = accepted / n
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return middle - half, middle + half
