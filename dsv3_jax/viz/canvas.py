"""An empty figure, and a finished one on disk."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dsv3_jax.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110

FORMATS = (".png", ".svg", ".pdf")
"""Suffixes of files that pictures are saved to."""

_FORMATS = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def check_matplotlib(what: str) -> None:
    """For a command to call before it reads anything, which may take an hour.

    Raises:
      ValueError: matplotlib, which ``what`` needs, is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{what}: expected matplotlib to be installed; pip install 'dsv3-jax[plot]'"
        )


def check_picture(what: str, path: str | Path) -> None:
    """Checks that a picture can be saved at ``path``, for a command to call before it begins work
    that may take an hour.

    Args:
      what: the flag or argument that the path came with; messages begin with it.

    Raises:
      ValueError: matplotlib is not installed; the path ends with none of .png, .svg and .pdf, is a
        directory, or is in one that does not exist or cannot be written to.
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
    """Writes the picture in the format that the path ends with. A file that was there is replaced
    only by a finished picture.

    Raises:
      ValueError: as :func:`check_picture`.
      OSError: the disk is full or failed.
    """
    check_picture("picture", path)
    content = io.BytesIO()
    figure.savefig(content, dpi=_DPI, format=Path(path).suffix[1:].lower())
    atomic_write(path, content.getvalue())


def visible(text: str) -> str:
    """A token's text as a label: escapes for what has no shape, ␣ for a run of spaces."""
    return re.sub(" +", "␣", repr(text)[1:-1])
