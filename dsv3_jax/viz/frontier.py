"""Throughput of devices against what a user sees, over batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv3_jax.plan.sweep import ACCEPTED, Point
from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def frontier(points: list[Point], title: str) -> Figure:
    """Tokens a second of a device over those of a user; each point says how many rows it has."""
    figure = new_figure(7.5, 4.8)
    from matplotlib.ticker import LogLocator, NullFormatter  # new_figure says where it is missing

    axes = figure.subplots()
    drafts = f"MTP, {ACCEPTED:.0%} of drafts accepted"
    kinds = ((False, "no speculation", "o-", -1), (True, drafts, "s--", 1))
    for mtp, label, style, side in kinds:
        of_kind = [point for point in points if point.mtp == mtp]
        if not of_kind:
            continue
        (line,) = axes.plot(
            [point.tokens_per_s_per_user for point in of_kind],
            [point.tokens_per_s_per_device for point in of_kind],
            style,
            ms=4,
            lw=1.2,
            label=label,
        )
        for point in of_kind:
            axes.annotate(
                f"{point.batch:,}",
                (point.tokens_per_s_per_user, point.tokens_per_s_per_device),
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
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, which="both")
    # Below the axes, where it hides no point.
    said = "decoding; numbers: sequences on all devices"
    figure.legend(loc="outside lower center", ncols=2, frameon=False, title=said)
    return figure
