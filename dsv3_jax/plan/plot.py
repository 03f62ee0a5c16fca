"""A picture of a sweep."""

from __future__ import annotations

from pathlib import Path

from dsv3_jax.plan.sweep import ACCEPTED, Point

_DPI = 110


def plot(points: list[Point], path: Path, title: str) -> None:
    """Tokens a second of a device over those of a user; each point says how many rows it has.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # an extra: nothing else here needs it
        from matplotlib.ticker import StrMethodFormatter
    except ModuleNotFoundError:
        raise ValueError(
            "--sweep: expected matplotlib to be installed; pip install 'dsv3-jax[plot]'"
        ) from None
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    drafts = f"with MTP drafts, {ACCEPTED:.0%} of which hold"
    for mtp, label, side in ((False, "a token a step", -1), (True, drafts, 1)):
        of_kind = [point for point in points if point.mtp == mtp]
        if not of_kind:
            continue
        (line,) = axes.plot(
            [point.tokens_per_s_per_user for point in of_kind],
            [point.tokens_per_s_per_device for point in of_kind],
            "o-",
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
        xlabel="tokens/s a user, at most",
        ylabel="tokens/s a device, at most",
        title=title,
        yscale="log",
    )
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="decode steps; numbers: rows of all devices")
    figure.savefig(path, dpi=_DPI)
