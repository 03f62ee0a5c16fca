"""Plot of a server's throughput against the speed that each user sees, over loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv3_jax.viz.canvas import label_log_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARETO, _OTHER, _LATENCY = "#225588", "#999999", "#cc6633"


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
    left.plot(
        [point.user_speed for point in front],
        [point.output_throughput for point in front],
        "o-",
        color=_PARETO,
        label="Pareto front",
    )
    others = [point for point in points if point not in front]
    if others:
        left.plot(
            [point.user_speed for point in others],
            [point.output_throughput for point in others],
            "o",
            color=_OTHER,
            label="surpassed in both",
        )
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
