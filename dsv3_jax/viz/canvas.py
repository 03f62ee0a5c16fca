"""An empty figure, and a finished one on disk."""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110


def check_matplotlib(what: str) -> None:
    """For a command to call before it reads anything, which may take an hour.

    Raises:
      ValueError: matplotlib, which ``what`` needs, is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{what}: expected matplotlib to be installed; pip install 'dsv3-jax[plot]'"
        )


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_matplotlib("pictures")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that notebooks show although pyplot, which keeps all of its own, has no part."""

        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, dpi=_DPI, format="png")
            return content.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """In the format that the path ends with."""
    figure.savefig(path, dpi=_DPI)


def visible(text: str) -> str:
    """A token's text as a label: escapes for what has no shape, ␣ for a run of spaces."""
    return re.sub(" +", "␣", repr(text)[1:-1])
