"""An empty figure, and a finished one on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(
            "pictures: expected matplotlib to be installed; pip install 'dsv3-jax[plot]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI)
