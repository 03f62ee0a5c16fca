"""Plots of serving: an engine over time, and a server over loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsv3_jax.viz.canvas import label_log_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RUNNING, _WAITING = "#4477aa", "#ddaa33"
_PROMPT, _OUTPUT = "#88ccee", "#225588"
_CACHE, _PREEMPTED = "#999999", "#bb3333"
_PARETO, _OTHER, _LATENCY = "#225588", "#999999", "#cc6633"
_MAX_INTERVALS = 240  # in a picture; more samples are averaged


def timeline(columns: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Plots requests, tokens per step and cache use over time.

    The upper part shows running requests, and waiting ones above them. The middle part shows the
    tokens of a mean step: prompt tokens and generated ones. The lower part shows the share of the
    cache that requests use, and a triangle for each interval with preemptions, with their number.

    Args:
      columns: samples of an engine, as ``Timeline.columns`` of :mod:`dsv3_jax.engine.stats`.
        There are at least two.

    Raises:
      ValueError: there are fewer than two samples.
    """
    samples = {name: np.asarray(values, float) for name, values in columns.items()}
    count = len(samples["seconds"])
    if count < 2:
        raise ValueError(f"columns: expected at least two samples, got {count}")
    figure = new_figure(9, 6)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[1.1, 1.1, 1])
    seconds, queues = samples["seconds"], (samples["running"], samples["waiting"])
    colors = (_RUNNING, _WAITING)
    top.stackplot(seconds, *queues, labels=("running", "waiting"), colors=colors, step="post")
    top.set(ylabel="requests")
    ends = _interval_ends(samples["steps"], samples["running"])
    _draw_tokens(middle, {name: values[ends] for name, values in samples.items()})
    _draw_cache(bottom, samples)
    bottom.set(xlabel="time (s)", xlim=(seconds[0], seconds[-1]))
    for axes in (top, middle, bottom):
        # Next to the axes, where it hides no data.
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


@dataclasses.dataclass(frozen=True)
class LoadPoint:
    """Figures of a server at one load."""

    label: str
    output_throughput: float
    """Tokens per second of all users."""
    median_tpot_ms: float
    """Median time per output token, in milliseconds."""
    median_ttft_ms: float
    p99_ttft_ms: float

    @property
    def user_speed(self) -> float:
        """Tokens per second that the median user sees."""
        return 1e3 / self.median_tpot_ms if self.median_tpot_ms else 0.0


def pareto(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """Returns the points that no other one surpasses in both throughput and speed per user, the
    fastest for its users first."""
    best: list[LoadPoint] = []
    for point in sorted(points, key=lambda p: (-p.user_speed, -p.output_throughput)):
        if not best or point.output_throughput > best[-1].output_throughput:
            best.append(point)
    return best


def sweep(points: Sequence[LoadPoint], title: str) -> Figure:
    """Plots throughput over speed per user on the left, and the time to the first token of each
    load on the right. A line joins the points of the Pareto front."""
    figure = new_figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    front = pareto(points)
    others = [point for point in points if point not in front]
    for group, style, color, label in (
        (front, "o-", _PARETO, "Pareto front"),
        (others, "o", _OTHER, "surpassed in both"),
    ):
        if group:
            speeds = [point.user_speed for point in group]
            throughputs = [point.output_throughput for point in group]
            left.plot(speeds, throughputs, style, color=color, label=label)
    for point in points:
        at = (point.user_speed, point.output_throughput)
        left.annotate(point.label, at, xytext=(5, 5), textcoords="offset points", fontsize=8)
    left.set(
        xlabel="tokens/s per user (median)",
        ylabel="output tokens/s of the server",
        # Room for the labels of the outermost points.
        xlim=(0, 1.3 * max(point.user_speed for point in points)),
        ylim=(0, 1.15 * max(point.output_throughput for point in points)),
    )
    left.legend(frameon=False, fontsize=9, loc="lower left")
    positions = range(len(points))
    for name, values, marker in (
        ("p99", [point.p99_ttft_ms for point in points], "s--"),
        ("median", [point.median_ttft_ms for point in points], "o-"),
    ):
        right.plot(positions, values, marker, color=_LATENCY, ms=4, label=name)
    right.set(ylabel="time to first token (ms)", yscale="log", xlabel="load")
    label_log_axis(right.yaxis)
    right.set_xticks(positions, [point.label for point in points], rotation=20, ha="right")
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure


def _interval_ends(steps: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Returns the samples between which tokens are averaged: in each interval a step has ended, or
    nothing runs."""
    ends = np.append(True, (np.diff(steps) > 0) | (running[1:] == 0))
    ends[-1] = True
    indices = np.flatnonzero(ends)
    few = np.linspace(0, len(indices) - 1, min(len(indices), _MAX_INTERVALS + 1)).astype(int)
    return indices[np.unique(few)]


def _draw_tokens(axes: Axes, samples: Mapping[str, np.ndarray]) -> None:
    """Draws the mean tokens of the steps that ended in each interval."""
    seconds, count = samples["seconds"], np.diff(samples["steps"])
    output, prompt = (
        np.divide(np.diff(samples[name]), count, out=np.zeros(len(count)), where=count > 0)
        for name in ("output_tokens", "prompt_tokens")
    )
    axes.stairs(output, seconds, fill=True, color=_OUTPUT, label="generated")
    both = output + prompt
    axes.stairs(both, seconds, baseline=output, fill=True, color=_PROMPT, label="prompt")
    axes.set(ylabel="tokens per step", ylim=(0, None))


def _draw_cache(axes: Axes, samples: Mapping[str, np.ndarray]) -> None:
    seconds, usage = samples["seconds"], 100 * samples["cache_usage"]
    axes.fill_between(seconds, usage, step="post", color=_CACHE, alpha=0.6, label="in use")
    axes.set(ylabel="cache (%)", ylim=(0, 118), yticks=(0, 25, 50, 75, 100))
    new = np.diff(samples["preemptions"])
    if new.any():
        at = seconds[1:][new > 0]
        height = np.full(len(at), 107)
        label = f"preemptions ({int(new.sum())})"
        axes.plot(at, height, "v", color=_PREEMPTED, ms=5, label=label, clip_on=False)
