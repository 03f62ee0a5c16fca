"""Plot of throughput against speed per user, over batch sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv3_jax.plan.sweep import ACCEPTED, Point
from dsv3_jax.viz.canvas import label_log_axis, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def frontier(points: list[Point], title: str) -> Figure:
    """Plots tokens per second per device over tokens per second per user. Each point is labelled
    with its batch size."""
    figure, axes = new_axes(7.5, 4.8)
    speculation = f"MTP, {ACCEPTED:.0%} acceptance"
    kinds = ((False, "no speculation", "o-", -1), (True, speculation, "s--", 1))
    for mtp, label, style, side in kinds:
        curve = [point for point in points if point.mtp == mtp]
        if not curve:
            continue
        positions = [(p.tokens_per_s_per_user, p.tokens_per_s_per_device) for p in curve]
        (line,) = axes.plot(*zip(*positions, strict=True), style, ms=4, lw=1.2, label=label)
        for point, position in zip(curve, positions, strict=True):
            axes.annotate(
                f"{point.batch:,}",
                position,
                xytext=(5 * side, 5 * side),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="bottom" if side > 0 else "top",
                fontsize=8,
                color=line.get_color(),
            )
    axes.set(
        xlabel="tokens/s per user (upper bound)",
        ylabel="tokens/s per device (upper bound)",
        title=title,
        yscale="log",
    )
    label_log_axis(axes.yaxis)
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, which="both")
    # The legend is below the axes, where it covers no point.
    note = "decoding; point labels: batch size over all devices"
    figure.legend(loc="outside lower center", ncols=2, frameon=False, title=note)
    return figure
