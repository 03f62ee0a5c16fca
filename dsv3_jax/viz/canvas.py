"""Creating figures and saving them to files."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dsv3_jax.files import atomic_write
from dsv3_jax.words import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_DPI = 110

FORMATS = (".png", ".svg", ".pdf")  # file name suffixes of the supported picture formats

_FORMATS = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def check_matplotlib(what: str) -> None:
    """Checks that matplotlib is installed. Commands call this before they begin work that may take
    an hour.

    Args:
      what: flag or feature that needs matplotlib; the message begins with it.

    Raises:
      ValueError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{what}: expected matplotlib to be installed; {how_to_install('plot')}")


def check_picture(what: str, path: str | Path) -> None:
    """Checks that a picture can be saved at ``path``. Commands call this before they begin work
    that may take an hour.

    Args:
      what: flag or argument with the path; messages begin with it.

    Raises:
      ValueError: matplotlib is not installed; the path does not end with .png, .svg or .pdf; it is
        a directory; or its directory does not exist or cannot be written.
    """
    check_matplotlib(what)
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{what}: expected a file name that ends with {_FORMATS}, got {path}")
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{what}: expected a file in a directory that exists, got {path}")
    if path.is_dir():
        raise ValueError(f"{what}: expected a file, got the directory {path}")
    if not os.access(directory, os.W_OK):
        raise ValueError(f"{what}: expected a directory that can be written to, got {directory}")


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, with its size in inches.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_matplotlib("pictures")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that notebooks display, although it was not created by pyplot, which would keep
        every figure in memory."""

        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, dpi=_DPI, format="png")
            return content.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure as :func:`new_figure` does, and the axes that fill it."""
    figure = new_figure(width, height)
    return figure, figure.subplots()


def label_log_axis(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers at 1, 2 and 5 times the powers of ten. By
    default, an axis of less than a decade has labels such as 6 x 10^2."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure to a file, in the format of the file name's suffix. An existing file is
    replaced only when the new picture is complete.

    Raises:
      ValueError: as :func:`check_picture`.
      OSError: the disk is full or failed.
    """
    check_picture("picture", path)
    content = io.BytesIO()
    figure.savefig(content, dpi=_DPI, format=Path(path).suffix[1:].lower())
    atomic_write(path, content.getvalue())


def visible(text: str) -> str:
    """Returns the text of a token as a label, with escape sequences for control characters and ␣
    for a run of spaces."""
    return re.sub(" +", "␣", repr(text)[1:-1])
